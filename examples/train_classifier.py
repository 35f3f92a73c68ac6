"""Trains an image classifier with top-k exchange, and prints accuracy and bytes.

python examples/train_classifier.py --compare      # scikit-learn's digits, 2 CPU workers
python examples/train_classifier.py --data DIR --model resnet20 --devices 4
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from lab.data import digits, folders
from lab.models import cnn, mlp, resnet20
from lightning_topk import CompressionMonitor, TopKStrategy, presets
from lightning_topk.volume import format_bytes

MODELS = {"mlp": mlp, "cnn": cnn, "resnet20": resnet20}


class Classifier(L.LightningModule):
    """An ordinary LightningModule: nothing here is about compression."""

    def __init__(self, model: str, shape: tuple[int, int, int], classes: int, lr: float, momentum: float) -> None:
        super().__init__()
        self.net = MODELS[model](shape, classes)
        self.lr, self.momentum = lr, momentum
        self.accuracy = MulticlassAccuracy(classes, average="micro")

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Cross-entropy of a batch of images ``[N, C, H, W]`` and labels ``[N]``."""
        images, labels = batch
        loss = torch.nn.functional.cross_entropy(self.net(images), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Counts correct answers."""
        images, labels = batch
        self.accuracy(self.net(images), labels)
        self.log("accuracy", self.accuracy, prog_bar=True, on_epoch=True)

    def on_train_epoch_end(self) -> None:
        """Logs the number of steps, because a spawned run returns only logged values."""
        self.log("steps", float(self.global_step))

    def configure_optimizers(self) -> dict[str, object]:
        """SGD with momentum and a cosine schedule over the planned steps."""
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=self.momentum, weight_decay=1e-4)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def datasets(root: Path | None) -> tuple[Dataset, Dataset, int]:
    """Training images, held-out images, and the number of classes.

    ``root`` is a folder with ``train/<class>/*`` and ``test/<class>/*``; without one, images are scikit-learn's digits.
    """
    if root is None:
        data = digits()
        return TensorDataset(data.examples, data.labels), TensorDataset(data.held_examples, data.held_labels), 10
    from torchvision.transforms import v2

    tensor = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.49, 0.48, 0.45], [0.25, 0.24, 0.26])]
    augment = v2.Compose([v2.Resize((32, 32)), v2.RandomCrop(32, padding=4), v2.RandomHorizontalFlip(), *tensor])
    train, test = folders(root, augment, v2.Compose([v2.Resize((32, 32)), *tensor]))
    return train, test, len(train.classes)


def topk_settings(options: argparse.Namespace, name: str) -> dict[str, object]:
    """The strategy's settings: from preset ``name`` with ``--preset``, else from the options."""
    if options.preset:
        own = name in ("dense", "dgc")  # these two set what they send
        return {**presets[name], **({} if own else {"ratio": options.ratio or 0.01})}
    return {
        "ratio": options.ratio,
        "saving": options.saving,
        "bidirectional": options.bidirectional,
        "topology": options.topology,
    }


def fit(options: argparse.Namespace, name: str) -> tuple[bool, dict[str, float]]:
    """Trains with ``"ddp"``, ``"topk"`` or a preset; returns whether this is rank 0, and the last logged values."""
    L.seed_everything(options.seed, workers=True, verbose=False)
    train, test, classes = datasets(options.data)
    shape = tuple(train[0][0].shape)
    compress = name != "ddp"
    settings = topk_settings(options, name) if compress else {}
    # Where the exchange applies momentum on the workers, the optimizer must not do so again.
    momentum = 0.0 if settings.get("momentum") else 0.9
    model = Classifier(options.model, shape, classes, options.lr, momentum)
    # Processes are spawned from here, unless torchrun or a cluster starts them.
    external = options.num_nodes > 1 or "TORCHELASTIC_RUN_ID" in os.environ
    start = {"start_method": "popen" if external else "spawn"}
    plugin = TopKStrategy(**settings, **start) if compress else L.pytorch.strategies.DDPStrategy(**start)
    trainer = L.Trainer(
        strategy=plugin,
        callbacks=[CompressionMonitor()] if compress else [],
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=options.devices,
        num_nodes=options.num_nodes,
        max_epochs=options.max_epochs,
        logger=False,
        log_every_n_steps=5,
        enable_checkpointing=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    batches = DataLoader(train, options.batch_size, shuffle=True, drop_last=True)
    trainer.fit(model, batches, DataLoader(test, options.batch_size))
    values = {key: float(value) for key, value in trainer.callback_metrics.items()}
    if not compress:
        elements = sum(p.numel() for p in model.parameters() if p.requires_grad)
        workers = trainer.world_size
        sent = values["steps"] * (2 * (workers - 1) * elements * 4 // workers)
        values |= {"topk/total_bytes": sent, "topk/saving": 1.0}
    return trainer.is_global_zero, values


def table(results: dict[str, dict[str, float]]) -> str:
    """The runs side by side. Bytes are those that rank 0 sent in the whole run."""
    lines = [f"{'strategy':<20}{'accuracy':>10}{'sent':>10}{'dense':>10}{'saving':>9}"]
    for name, values in results.items():
        sent, saving = (values.get(f"topk/{key}", 0.0) for key in ("total_bytes", "saving"))
        cells = format_bytes(sent), format_bytes(saving * sent)
        lines.append(f"{name:<20}{values['accuracy']:>10.2%}{cells[0]:>10}{cells[1]:>10}{saving:>8.1f}x")
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", type=Path, help="a folder with train/<class>/* and test/<class>/* (default: digits)")
    add("--model", choices=list(MODELS), default="mlp", help="default: %(default)s")
    gpus = torch.cuda.device_count()
    add("--devices", type=int, default=gpus or 2, help="workers on each node (default: all GPUs, else 2 CPU processes)")
    add("--num-nodes", type=int, default=1, help="default: %(default)s")
    add("--compare", action="store_true", help="train with ddp, too")
    add(
        "--preset",
        nargs="+",
        choices=list(presets),
        help="systems of the papers to train in turn; they ignore --saving, --no-bidirectional and --topology, and use "
        "--ratio (default: 0.01), except dense and dgc",
    )
    add("--saving", type=float, help="how many times fewer bytes than all-reduce to send (default: 50)")
    add("--ratio", type=float, help="fraction of the entries that each worker sends, instead of --saving")
    add("--no-bidirectional", dest="bidirectional", action="store_false", help="servers send every nonzero entry")
    add("--topology", default="sharded", help="sharded, single_server or allgather (default: %(default)s)")
    add("--max-epochs", type=int, default=20, help="default: %(default)s")
    add("--batch-size", type=int, default=32, help="batch size per worker (default: %(default)s)")
    add("--lr", type=float, default=0.05, help="default: %(default)s")
    add("--seed", type=int, default=0, help="default: %(default)s")
    return parser.parse_args()


def main() -> None:
    """Trains, and prints the table."""
    options = parse()
    names = [*["ddp"] * options.compare, *(options.preset or ["topk"])]
    runs = {name: fit(options, name) for name in names}
    if all(is_zero for is_zero, _ in runs.values()):  # else another process prints
        print("\n" + table({name: values for name, (_, values) in runs.items()}))


if __name__ == "__main__":
    main()
