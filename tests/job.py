"""A training script for launchers: resumes from its folder's last checkpoint; a rank may die in its first life.

usage: job.py FOLDER RANK REQUESTS OPTIONS: which rank dies (or -1) at which request; strategy and Trainer, as JSON.
"""

import json
import os
import signal
import sys
from functools import partial
from pathlib import Path

import lightning as L
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from trainers import QUIET

from lightning_topk import CompressionMonitor, TopKStrategy
from lightning_topk.runtime import collectives

FIRST_LIFE = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"


def tell(monitor, trainer, *_) -> None:
    """Prints the bytes of this life, their steps, and whether it is the job's first."""
    if trainer.is_global_zero:
        sent = {name: float(value) for name, value in monitor.volume.compute().items()}
        print(json.dumps({**sent, "steps": monitor.volume.update_count, "first life": FIRST_LIFE}), flush=True)


def main(folder: Path, victim: int, requests: int, strategy: dict, **options) -> None:
    """Trains."""
    perform, count = collectives.perform, [0]

    def striking(*args):
        count[0] += 1
        if FIRST_LIFE and int(os.environ.get("RANK", "-2")) == victim and count[0] == requests:
            os.kill(os.getpid(), signal.SIGKILL)
        return perform(*args)

    collectives.perform = striking
    L.seed_everything(0, verbose=False)
    (folder / "pids").mkdir(parents=True, exist_ok=True)
    (folder / "pids" / str(os.getpid())).touch()
    saving = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1, save_last=True)
    monitor = CompressionMonitor()
    callbacks = [monitor, saving, LambdaCallback(on_train_end=partial(tell, monitor))]
    options = {**QUIET, "enable_checkpointing": True, "log_every_n_steps": 1, **options}
    trainer = L.Trainer(strategy=TopKStrategy(**strategy), callbacks=callbacks, **options)
    last = folder / "last.ckpt"
    trainer.fit(BoringModel(), ckpt_path=last if last.exists() else None)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), **json.loads(sys.argv[4]))
