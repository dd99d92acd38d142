// How the search ranks what it finds. By Sphinx's own numbers, a page that has one word of the query in a heading ties with a heading
// that is the query, and the alphabet decides.
var Scorer = {
  score: ([page, , , , score, , kind]) => {
    if (kind === "title") return score + 15;
    pages ??= pagesWithHeading();
    return score + (pages.has(page) ? 6 : 0);
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};

// Found once for a query.
var pages;

// The pages with a heading that has all words of the query, in any order and form.
function pagesWithHeading() {
  const words = stems(new URLSearchParams(window.location.search).get("q") ?? "");
  const { alltitles, docnames } = Search._index;
  const found = Object.entries(alltitles).filter(([title]) => {
    const inTitle = stems(title);
    return words.every((word) => inTitle.includes(word));
  });
  return new Set(found.flatMap(([, places]) => places.map(([file]) => docnames[file])));
}

// The words of a text as Sphinx searches for them.
function stems(text) {
  const stemmer = new Stemmer();
  const words = splitQuery(text.toLowerCase()).filter((word) => ![...stopwords].includes(word));
  return words.map((word) => stemmer.stemWord(word));
}
