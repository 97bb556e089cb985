"""`anybatch plan`: the plan, its memory and its picture, before anything runs."""

import json
from dataclasses import replace
from typing import Any

from anybatch.cli import options as kinds, target, train as actions
from anybatch.observe import figure, memory
from anybatch.recipes import find_recipe
from anybatch.recompute import POLICIES
from anybatch.step import foresee


def plan(options: kinds.PlanOptions) -> tuple[dict[str, Any], str]:
    """Run `anybatch plan`: return the fastest plan within a budget, before anything runs."""
    if options.plot:
        figure.checked(options.plot)  # before planning, which may take a while
    found = target.find(options.target, options.data, actions.recipe_options(options))
    recipe = None if ":" in options.target else find_recipe(options.target)
    name = options.optimizer or ("adamw" if recipe is None else recipe.optimizer)
    more = {"momentum": 0.9} if recipe is not None and name == "sgd" else {}  # like `anybatch train`
    optimizer = found.optimizer or actions.OPTIMIZERS[name](found.model.parameters(), lr=1e-3, **more)
    report = foresee.plan(
        found.model,
        found.loss,
        optimizer,
        found.train,
        memory=None if options.memory == "none" else options.memory,
        rows=options.batch_size,
        device=None if options.device == "auto" else options.device,
        micro_batch=options.micro_batch,
        collate=found.collate,
        precision=options.precision,
        options=replace(
            found.options,
            recompute=_blocks(options.recompute),
            batch_norm=options.batch_norm or found.options.batch_norm,
        ),
    )
    message = str(report)
    if found.optimizer is None:
        message += f"\nnote: the optimizer was taken to be {name}; name another with --optimizer"
    if options.plot:
        message += f"\npicture      {memory.plot(report.ledger, options.plot, budget=report.budget)}"
    return json.loads(report.to_json()), message


def _blocks(asked: str | None) -> str | list[str] | None:
    # One word is a policy for all blocks; other texts are patterns of block names.
    return asked if asked in (None, "all", *POLICIES) else [asked]
