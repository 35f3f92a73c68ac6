"""A training script for launchers: resumes from its folder's last checkpoint; a rank may die in its first life.

usage: job.py FOLDER RANK REQUESTS OPTIONS: which rank dies (or -1) at which request; strategy and Trainer, as JSON.
"""

import json
import os
import signal
import sys
from pathlib import Path

import lightning as L
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from trainers import QUIET

from lightning_topk import CompressionMonitor, TopKStrategy
from lightning_topk.runtime import collectives

FIRST_LIFE = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"


def tell(trainer, *_) -> None:
    """Prints the last logged values, and whether this is the job's first life."""
    if trainer.is_global_zero:
        logged = {key: float(value) for key, value in trainer.callback_metrics.items()}
        print(json.dumps({**logged, "first life": FIRST_LIFE}), flush=True)


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
    callbacks = [CompressionMonitor(details=True), saving, LambdaCallback(on_train_end=tell)]
    options = {**QUIET, "enable_checkpointing": True, "log_every_n_steps": 1, **options}
    trainer = L.Trainer(strategy=TopKStrategy(**strategy), callbacks=callbacks, **options)
    last = folder / "last.ckpt"
    trainer.fit(BoringModel(), ckpt_path=last if last.exists() else None)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), **json.loads(sys.argv[4]))
