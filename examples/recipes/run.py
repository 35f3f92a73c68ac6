"""What was tried beside ``saving=50``: ``reproduce learning`` with more methods, see README.md.

python examples/recipes/run.py                                        # all of them, on digits and text; resumable
python examples/recipes/run.py --models "char lstm" --methods "saving 50" "saving 150" --seeds 1
"""

from __future__ import annotations

import argparse
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import Any

from newer import DeMo, LocalSteps
from variants import RATIO, Adaptive, Decaying, Differences, OwnShards, Tried, cosine, geometric

from lightning_topk.lab.commands import add_options, finish
from lightning_topk.lab.papers.learning import METHODS, Method, run
from lightning_topk.simulate import Cluster


def flushed(every: int, ratio: float, step: int) -> float:
    """The ratio in a step, where all of the gradient is sent once in so many steps."""
    return 1.0 if step % every == every - 1 else ratio


def changed(cluster: Any = Cluster, keeps_momentum: bool = True, **settings: Any) -> Method:
    """The default with other settings, in as many bytes."""
    return Tried(settings, workers=cluster, keeps_momentum=keeps_momentum)


def at(ratio: float, wire: str) -> Method:
    """A constant density in one format of values."""
    return Method({"ratio": ratio, "wire": wire, "beta1": 0.0})


TRIED: dict[str, Method] = {
    # Other amounts.
    **{f"saving {saving}": Method({"saving": saving}) for saving in (25, 150, 400)},
    **{f"{ratio:g} in {wire}": at(ratio, wire) for ratio in (0.001, 0.01, 0.06) for wire in ("bf16", "int4")},
    # Other courses of the density; all end at 0.001.
    "cosine from 0.12": Tried(course=partial(cosine, 0.12)),
    "cosine from 0.04": Tried(course=partial(cosine, 0.04)),
    "exponential from 0.25 over half": Tried(course=partial(geometric, 0.25, 0.5)),
    "flush every 50": Method({"ratio": partial(flushed, 50, RATIO), "beta1": 0.0}),
    "adaptive, error 0.5": Tried({"ratio": RATIO, "beta1": 0.0}, workers=partial(Adaptive, target=0.5)),
    # The default with one thing changed, in as many bytes.
    "bf16": changed(wire="bf16"),
    "int8": changed(wire="int8"),
    "servers send x2": Method({"ratio": 0.04, "server_ratio": 0.08, "beta1": 0.0}),
    "1-D dense": changed(dense_parameters=("*bias*",)),
    "first layer dense": changed(dense_parameters=("0.weight",)),
    "lr ratio": changed(lr_ratio=True),
    "local clipping": changed(clip_norm=1.0, scope="model"),
    "decay 0.97": changed(partial(Decaying, factor=0.97)),
    "own shards": changed(OwnShards),
    # Momentum: the optimizer's, the workers', none.
    "AdamW's own beta1": Method({"beta1": 0.9}),
    "SGD's momentum 0.8": Tried(momentum=0.8),
    "SGD's momentum 0.5": Tried(momentum=0.5),
    "SGD's momentum 0": Tried(momentum=0.0),
    "dense, SGD's momentum 0.5": Tried({"topology": "dense"}, momentum=0.5),
    "dense, no momentum": Tried({"topology": "dense"}, keeps_momentum=False),
    "SGD's momentum, masked": changed(momentum_masking=True),
    "masked, saving 25": Tried({"saving": 25, "momentum_masking": True}),
    "masked, lr ratio": changed(momentum_masking=True, lr_ratio=True),
    "momentum correction": changed(momentum=0.9, keeps_momentum=False, beta1=0.0),
    "momentum correction unmasked": changed(momentum=0.9, momentum_masking=False, keeps_momentum=False, beta1=0.0),
    "EF21-SGDM": changed(partial(Differences, new=0.1), keeps_momentum=False),
    # Newer ones, with learning rates of their own.
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
    add_options(parser, run)
    parser.add_argument("--out", type=Path, default=Path("reproduced"), help="folder for files (default: %(default)s)")
    arguments, known = parser.parse_args(), METHODS | TRIED
    try:
        finish(arguments, shlex.join(["python", *sys.argv]), out=arguments.out, known=known).write(arguments.out)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
