// How the search ranks what it finds. By Sphinx's own numbers, a page that has one word of the query in a heading ties with a heading
// that is the query, and the alphabet decides. Here, the page comes first whose best section has most of the words, and the result
// leads to that section. docs/_ext/sections.py writes `sections`.
var Scorer = {
  score: (result) => {
    const [page, title, , , score, , kind] = result;
    if (kind === "title") return 24 + score / 8 + place(page);
    const { anchor, heading, share } = bestSection(page);
    if (kind === "text" && anchor && share > 0.3) {
      result[1] = `${title} > ${heading}`;
      result[2] = `#${anchor}`;
    }
    return score / 4 + 20 * share + place(page);
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

// The section of a page that has most words of the query, and their share. A word counts the more, the fewer sections have it, and
// twice in a heading.
function bestSection(page) {
  const all = index();
  const words = stems(new URLSearchParams(window.location.search).get("q") ?? "");
  const weights = [...words].map((word) => {
    const n = all.filter(({ body, head }) => body.has(word) || head.has(word)).length;
    return [word, Math.log(1 + all.length / (n || 1))];
  });
  const sum = weights.reduce((total, [, weight]) => total + 2 * weight, 0);
  let best = { share: 0 };
  for (const section of all.filter((section) => section.page === page)) {
    const times = (word) => (section.head.has(word) ? 2 : section.body.has(word) ? 1 : 0);
    const share = weights.reduce((total, [word, weight]) => total + times(word) * weight, 0) / (sum || 1);
    if (share > best.share) best = { ...section, share };
  }
  return best;
}

// All sections, stemmed once.
var stemmed;

function index() {
  stemmed ??= Object.entries(sections).flatMap(([page, ofPage]) =>
    ofPage.map(([anchor, heading, text]) => ({ page, anchor, heading, head: stems(heading), body: stems(text) })),
  );
  return stemmed;
}

// Pages that tie come in the order of the sidebar.
function place(page) {
  const links = [...document.querySelectorAll(".sidebar-tree a")].map((link) => link.getAttribute("href"));
  const at = links.indexOf(`${page}.html`);
  return at < 0 ? 0 : 1 - at / links.length;
}

// The words of a text as Sphinx searches for them.
function stems(text) {
  const stemmer = new Stemmer();
  const words = splitQuery(text.toLowerCase()).filter((word) => ![...stopwords].includes(word));
  return new Set(words.map((word) => stemmer.stemWord(word)));
}
