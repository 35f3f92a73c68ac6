"""What was tried beside ``saving=50``: ``reproduce learning`` with more methods, see README.md.

python examples/recipes/run.py                                        # all of them, on digits and text; resumable
python examples/recipes/run.py --models "char lstm" --methods "saving 50" "saving 150" --seeds 1
"""

from __future__ import annotations

import argparse
import shlex
import sys
from dataclasses import replace
from pathlib import Path

from newer import Averaged, DeMo, LocalSteps
from typing_extensions import override

from lightning_topk.lab.commands import COMMANDS, add_options, finish
from lightning_topk.lab.papers.learning import METHODS, Method, Task, run
from lightning_topk.lab.training import Optimizer


class Format(Method):
    """A constant ratio in one format of values; SGD's momentum is its own, and Adam has none."""

    @override
    def optimizer(self, task: Task) -> Optimizer:
        return replace(task.optimizer, momentum=0.0) if task.text else task.optimizer


TRIED: dict[str, Method] = {
    **{f"saving {saving}": Method({"saving": saving}) for saving in (150, 400)},
    "momentum not adapted": Method({"adapt_momentum": False}),
    **{
        f"{ratio:g} in {wire}": Format({"ratio": ratio, "wire": wire, "adapt_momentum": False})
        for ratio in (0.001, 0.01, 0.06)
        for wire in ("bf16", "int4")
    },
    "EF21-SGDM": Averaged(),
    **{f"DeMo, lr {lr:g}": DeMo(lr=lr) for lr in (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)},
    **{
        f"{every} local steps, outer lr {lr:g}, momentum {momentum:g}": LocalSteps(
            every=every, lr=lr, momentum=momentum
        )
        for every in (4, 15)
        for lr, momentum in ((1.0, 0.0), (0.7, 0.9), (0.4, 0.8))
    },
}
"""By name."""


def main() -> None:
    """Runs the methods that were asked for, beside those of the package."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, f"{COMMANDS['reproduce learning'][2]} out")
    given = {"out": Path("reproduced"), **vars(parser.parse_args())}
    given["out"].mkdir(parents=True, exist_ok=True)
    try:
        result = finish(run, {**given, "known": METHODS | TRIED}, shlex.join(["python", *sys.argv]))
    except ValueError as error:
        parser.error(str(error))
    result.write(given["out"])


if __name__ == "__main__":
    main()
