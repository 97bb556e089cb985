"""Flat keywords of a step, split into its own and its options, for tests that draw or combine them."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from anybatch import Options

NAMES = {one.name for one in fields(Options)}


def flat(keywords: Mapping[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """The keywords of `Step`, `BatchLoss` or `plan`, with those of `Options` as `options`."""
    given = {**(keywords or {}), **more}
    moved = {name: given.pop(name) for name in NAMES & given.keys()}
    return {**given, "options": Options(**moved)} if moved else given
