"""The types of values in messages from managers to the scheduler, with their bounds."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any

from msgspec import Meta

from dask_cml.naming import GROUP_NAME
from dask_cml.options.table import MOST_SESSIONS

Text = Annotated[str, Meta(min_length=1, max_length=300)]
Group = Annotated[str, Meta(max_length=300, pattern=rf"\A{GROUP_NAME.pattern}\Z")]
Manager = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9_.-]{1,64}\Z")]
URL = Annotated[str, Meta(max_length=2000, pattern=r"\Ahttps?://")]
Number = Annotated[int, Meta(ge=0, le=2**53)]
Count = Annotated[int, Meta(ge=0, le=MOST_SESSIONS)]
#: Less than ten years.
Seconds = Annotated[float, Meta(gt=0, lt=10 * 365 * 24 * 3600)]
Age = Annotated[float, Meta(ge=0, lt=10 * 365 * 24 * 3600)]
Names = Annotated[Collection[Text], Meta(max_length=MOST_SESSIONS)]
#: Texts by the names of sessions, and numbers by the names of worker groups.
Texts = Annotated[Mapping[Text, Text], Meta(max_length=MOST_SESSIONS)]
Wishes = Mapping[Group, Number]
#: Checked one by one, so that an invalid one refuses no other.
Operations = Annotated[Sequence[Any], Meta(max_length=MOST_SESSIONS)]
#: Options for JSON.
Options = Mapping[Any, Any]
