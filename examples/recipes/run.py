"""Recipes that were tried beside the default one: ``reproduce recipes`` with more of them, see README.md.

python examples/recipes/run.py                                        # all of them, on digits and text; resumable
python examples/recipes/run.py --models "char lstm" --recipes default "from 0.04" --seeds 1
"""

from __future__ import annotations

import argparse
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import Any

from variants import Adaptive, Decaying, Differences, OwnShards, Tried

from lightning_topk import ExponentialWarmup
from lightning_topk.lab.commands import add_options, finish
from lightning_topk.lab.papers.recipes import RATIO, RECIPES, Recipe, begins, run
from lightning_topk.simulate import Cluster


def flushed(every: int, ratio: float, step: int) -> float:
    """The ratio in a step, where all of the gradient is sent once in so many steps."""
    return 1.0 if step % every == every - 1 else ratio


def more(cluster: Any = Cluster, keeps_momentum: bool = True, **settings: Any) -> Recipe:
    """The default with other settings, in as many bytes."""
    return Tried(settings, equal_bytes=True, workers=cluster, keeps_momentum=keeps_momentum)


TRIED: dict[str, Recipe] = {
    "plain": Recipe({"recipe": "plain"}),
    # Other courses of the density.
    "constant density, equal bytes": more(recipe="plain", wire="int4", beta1=0.0),
    "exponential over 50 %, equal bytes": more(ratio=ExponentialWarmup(RATIO, 0.25, share=0.5), wire="int4", beta1=0.0),
    "from 0.48": Recipe(begins(0.48)),
    "from 0.04": Recipe(begins(0.04)),
    "from 0.01": Recipe(begins(0.01)),
    "flush every 50": Recipe({"ratio": partial(flushed, 50, RATIO), "beta1": 0.0}),
    "adaptive, error 0.5": Tried({"recipe": "plain", "beta1": 0.0}, workers=partial(Adaptive, target=0.5)),
    # The default with one thing changed.
    "bf16, equal bytes": more(wire="bf16"),
    "int8, equal bytes": more(wire="int8"),
    "servers send x2, equal bytes": more(server_ratio=2 * RATIO),
    "servers send x4, equal bytes": more(server_ratio=4 * RATIO),
    "1-D dense, equal bytes": more(dense_parameters=("*bias*",)),
    "lr ratio, equal bytes": more(lr_ratio=True),
    "local clipping, equal bytes": more(clip_norm=1.0, scope="model"),
    "decay 0.97, equal bytes": more(partial(Decaying, factor=0.97)),
    "own shards, equal bytes": more(OwnShards),
    # Momentum: the optimizer's, the workers', none.
    "AdamW's own beta1": Recipe({"beta1": 0.9}),
    "SGD's momentum 0.8": Tried(momentum=0.8),
    "SGD's momentum 0.5": Tried(momentum=0.5),
    "dense, SGD's momentum 0.5": Tried({"topology": "dense"}, momentum=0.5),
    "dense, no momentum": Tried({"topology": "dense"}, keeps_momentum=False),
    "momentum correction, equal bytes": more(momentum=0.9, keeps_momentum=False),
    "momentum correction unmasked, equal bytes": more(momentum=0.9, momentum_masking=False, keeps_momentum=False),
    "EF21-SGDM, equal bytes": more(partial(Differences, new=0.1), keeps_momentum=False),
}
"""By name; all at a ratio of 0.001 in the long run."""


def main() -> None:
    """Runs the recipes that were asked for, beside those of the package."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, run)
    parser.add_argument("--out", type=Path, default=Path("reproduced"), help="folder for files (default: %(default)s)")
    arguments, known = parser.parse_args(), RECIPES | TRIED
    try:
        finish(arguments, shlex.join(["python", *sys.argv]), out=arguments.out, known=known).write(arguments.out)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
