// How the search ranks what it finds. By Sphinx's own numbers, a page that has one word of the query in a heading ties with a heading
// that is the query, and the alphabet decides.
var Scorer = {
  score: ([page, , , , score, , kind]) => score + (kind === "title" ? 15 : hasHeading(page) ? 6 : 0),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};

// Whether one heading of a page has all words of the query, in any order and form.
function hasHeading(page) {
  const words = stems(new URLSearchParams(window.location.search).get("q") ?? "");
  const { alltitles, docnames } = Search._index;
  return Object.entries(alltitles).some(
    ([title, places]) =>
      words.every((word) => stems(title).includes(word)) && places.some(([file]) => docnames[file] === page),
  );
}

// The words of a text as Sphinx searches for them.
function stems(text) {
  const stemmer = new Stemmer();
  const words = splitQuery(text.toLowerCase()).filter((word) => ![...stopwords].includes(word));
  return words.map((word) => stemmer.stemWord(word));
}
