"""The pages, and the form of a new cluster."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jinja2
from markupsafe import Markup, escape
from tornado.web import HTTPError

from dask_cml.options.table import Option
from dask_cml.options.unattended import offered_options, typed
from dask_cml.records.history import SessionHours, where_logs_are
from dask_cml.serve.access import POLICY, Handler
from dask_cml.serve.api import ApiHandler
from dask_cml.words import format_duration, format_time

_FOLDER = Path(__file__).parent
#: A browser can draw this many sessions every two seconds.
_MOST_SESSIONS = 200
_UNKNOWN = "\N{EN DASH}"
#: The most useful panes of the dashboard, by their routes. The page ``status`` contains all panes.
_PANES = {
    "individual-task-stream": "Task stream",
    "individual-progress": "Progress",
    "individual-workers-memory": "Memory of each worker",
    "individual-cpu": "CPU of each worker",
    "individual-nprocessing": "Tasks of each worker",
    "individual-workers": "Table of workers",
    "individual-graph": "Task graph",
    "individual-profile": "Profile",
}
#: The keys of the options that most clusters need.
_USUAL = ("name", "n-workers", "cpu", "memory", "nvidia-gpu", "idle-timeout")
_YES = "on"
#: The titles of error pages by status. For others, the name of the status.
_TITLES = {401: "You are not logged in", 403: "Request refused", 404: "No such cluster"}


class Page(Handler):
    """A page of HTML."""

    titles = _TITLES

    def show(self, template: str, **values: Any) -> None:
        """Answer with a page.

        Parameters
        ----------
        template : str
            The name of the template, without the endings.
        **values
            The values of its variables.
        """
        user = self.current_user
        frames = self.dashboards.host(self.request) if self.dashboards else "'none'"
        self.set_header("Content-Security-Policy", f"{POLICY}; frame-src {frames}")
        common = {
            "root": self.root,
            "user": user,
            "read_only": self.access.read_only,
            "token": self.xsrf_token.decode() if user and user.may_change else None,
            "problem": self.clusters.problem,
        }
        self.finish(render(template, **{**common, **values}))

    def answer_error(self, message: str) -> None:
        """Answer with a page that explains the error."""
        title = self.titles.get(self.get_status(), self._reason)
        self.show("error", title=title, message=message, problem=None)  # the user may be unknown


class ClustersPage(Page):
    """The list of all clusters."""

    def get(self) -> None:
        """Show the list."""
        clusters = self.clusters.describe()
        keys = ("n_arrived", "n_workers", "threads", "memory")
        sums = {key: sum(cluster[key] or 0 for cluster in clusters) for key in keys}
        self.show("clusters", clusters=clusters, sums=sums)


class NewClusterPage(Page):
    """The form of a new cluster."""

    def get(self) -> None:
        """Show the form."""
        self.show("new", sections=form_sections())


class NewCluster(ApiHandler):
    """``/api/form``, for the web UI alone."""

    async def post(self) -> None:
        """Create the cluster of a completed form."""
        await self.create(form_arguments({name: str(text) for name, text in self.body().items()}))


def form_sections() -> dict[str, list[Option]]:
    """Return the options by heading. The usual options come first, below ``""``."""
    options = {option.key: option for option in _arguments()}
    sections = {"": [options.pop(key) for key in _USUAL]}
    for option in options.values():
        sections.setdefault(option.heading, []).append(option)
    return sections


def _arguments() -> list[Option]:
    """Return the options of the form."""
    # All clusters that the server creates have its configuration.
    return [option for option in offered_options() if option.is_argument]


def form_arguments(texts: Mapping[str, str]) -> dict[str, Any]:
    """Return the arguments of CMLCluster in a completed form, without empty fields.

    Parameters
    ----------
    texts : mapping of str to str
        The texts of the fields by the names of the arguments. Unchecked checkboxes are missing.

    Raises
    ------
    ValueError
        If a text is invalid. The message omits texts that may be secrets. CMLCluster checks the values.
    """
    known = {option.name: option for option in _arguments()}
    if unknown := sorted(texts.keys() - known.keys()):
        raise ValueError(f"invalid option {unknown[0]!r}: expected one of {', '.join(known)}")
    given: dict[str, Any] = {}
    for name, option in known.items():
        text = texts.get(name, "").strip()
        if option.kind == "boolean":
            given[name] = text == _YES
        elif text:
            lines = [line.strip() for line in text.splitlines() if line.strip()]
            given[name] = lines if option.kind == "object" else text
    return typed(given)


class ClusterPage(Page):
    """One cluster."""

    async def get(self, name: str) -> None:
        """Show the cluster."""
        cluster = await self.details(name)
        sessions = shown = cluster["sessions"]
        if len(sessions) > _MOST_SESSIONS:  # the scheduler first, and connected workers last
            shown = sorted(sessions, key=lambda session: (session["role"], session["status"] == "connected"))
            shown = shown[:_MOST_SESSIONS]
        live = {"Scheduler" if session["role"] == "scheduler" else session["name"] for session in sessions}
        self.show("cluster", cluster=cluster, shown_sessions=shown, live=live, panes=_PANES)


class HistoryPage(Page):
    """The list of ended clusters."""

    async def get(self) -> None:
        """Show the list, with sums by day and user."""
        clusters = await self.clusters.ended()
        sums: dict[str, dict[str, SessionHours]] = {"Day": {}, "User": {}}
        for cluster in clusters:
            keys = {"Day": format_time(cluster.ended, "%Y-%m-%d"), "User": cluster.user or _UNKNOWN}
            for title, key in keys.items():
                sums[title][key] = sums[title].get(key, SessionHours()) + cluster.usage.total
        self.show("history", clusters=clusters, sums=sums)


class EndedPage(Page):
    """One ended cluster."""

    async def get(self, id: str) -> None:
        """Show the cluster."""
        [cluster] = await self.clusters.ended(id)
        logs = await asyncio.to_thread(where_logs_are, cluster)
        self.show("ended", cluster=cluster, usage=cluster.usage.to_json(), logs=logs)


class NotFound(Page):
    """Answers requests for unknown addresses."""

    titles = _TITLES | {404: "No such page"}

    def prepare(self) -> None:
        """Answer with 404."""
        super().prepare()
        if not self._finished:
            raise HTTPError(404, "No page is at this address")

    def answer_error(self, message: str) -> None:
        """Answer with a page, or below the path of the API with JSON."""
        if self.request.path.startswith("/api/"):
            self.finish({"error": message})
        else:
            super().answer_error(message)


ROUTES: list[Any] = [
    (r"/", ClustersPage),
    (r"/new", NewClusterPage),
    (r"/api/form", NewCluster),
    (r"/clusters/([^/]+)", ClusterPage),
    (r"/history", HistoryPage),
    (r"/history/([^/]+)", EndedPage),
]


# -- the templates


def render(template: str, **values: Any) -> str:
    """Fill a template of the web UI with values."""
    return _templates().get_template(f"{template}.html.j2").render(values)


@functools.cache
def _templates() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(str(_FOLDER / "templates")),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        amounts=lambda values: " ".join(f"{name}={amount:g}" for name, amount in values.items()) or None,
        # In GiB, with three digits
        bytes=lambda value: _UNKNOWN if value is None else f"{float(f'{value / 2**30:.3g}'):,g} GiB",
        hours=lambda value: _UNKNOWN if value is None else f"{value:,.2f}",
        known=lambda value: _UNKNOWN if value is None else value,
        marked=_marked,
        time=format_time,
        count=lambda value: _UNKNOWN if value is None else f"{value:,}",
        number=lambda value: _UNKNOWN if value is None else f"{value:g}",
        quoted=lambda name: quote(name, safe=""),
        duration=lambda value: _UNKNOWN if value is None else format_duration(max(value, 0)),
    )
    return environment


def _marked(text: str) -> Markup:
    """Return a text as HTML, with backquoted parts as code."""
    parts = text.split("`")
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if i % 2 else escape(part) for i, part in enumerate(parts)
    )
