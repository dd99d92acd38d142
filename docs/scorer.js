// How the search ranks what it finds. By Sphinx's own numbers, a page that has one word of the query in a heading ties with a heading
// that is the query, and the alphabet decides.
var Scorer = {
  score: ([, , , , score, , kind]) => (kind === "title" ? score + 15 : score),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
