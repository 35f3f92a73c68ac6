"""Trains an image classifier through top-k exchange, and prints accuracy and bytes.

python examples/train_classifier.py --compare               # scikit-learn's digits, 2 CPU workers
python examples/train_classifier.py --data DIR --model resnet20 --plot run.png
python examples/train_classifier.py --data cifar10 --download --model vgg16 --devices 4
"""

from __future__ import annotations

import argparse
import csv
import os
import tempfile
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger
from models import MODELS
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from lightning_topk import CompressionMonitor, TopKStrategy, presets
from lightning_topk.lab.data import digits, folders
from lightning_topk.lab.report import Curve, Panel, draw
from lightning_topk.volume import format_bytes


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
        """Counts right answers."""
        images, labels = batch
        self.accuracy(self.net(images), labels)
        self.log("accuracy", self.accuracy, prog_bar=True, on_epoch=True)

    def on_train_epoch_end(self) -> None:
        """Logs the steps taken, since a spawned run returns only what was logged."""
        self.log("steps", float(self.global_step))

    def configure_optimizers(self) -> dict[str, object]:
        """SGD with momentum and a cosine schedule over the planned steps."""
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=self.momentum, weight_decay=1e-4)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def datasets(source: str | None, download: bool) -> tuple[Dataset, Dataset, int]:
    """Training images, held-out images, and the number of classes.

    Args:
        source: A folder with ``train/<class>/*`` and ``test/<class>/*``; or ``"cifar10"``; or None for
            scikit-learn's digits.
        download: Whether to download CIFAR-10 if it is missing.
    """
    if source is None:
        data = digits()
        return TensorDataset(data.examples, data.labels), TensorDataset(data.held_examples, data.held_labels), 10
    from torchvision.datasets import CIFAR10
    from torchvision.transforms import v2

    tensor = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.49, 0.48, 0.45], [0.25, 0.24, 0.26])]
    augment = v2.Compose([v2.Resize((32, 32)), v2.RandomCrop(32, padding=4), v2.RandomHorizontalFlip(), *tensor])
    plain = v2.Compose([v2.Resize((32, 32)), *tensor])
    if source == "cifar10":
        train = CIFAR10("data", train=True, transform=augment, download=download)
        test = CIFAR10("data", train=False, transform=plain, download=download)
    else:
        try:
            train, test = folders(Path(source), augment, plain)
        except ValueError as error:
            raise SystemExit(f"--data {source}: {error} Or give 'cifar10' with --download.") from error
    return train, test, len(train.classes)


def topk_settings(options: argparse.Namespace, name: str) -> dict[str, object]:
    """The strategy's settings: those of preset ``name`` with ``--preset``, else those of the options."""
    if options.preset:
        own = name in ("dense", "dgc")  # these two say how much they send
        return {**presets[name], **({} if own else {"ratio": options.ratio or 0.01})}
    return {
        "ratio": options.ratio,
        "saving": options.saving,
        "server_ratio": options.server_ratio,
        "bidirectional": options.bidirectional,
        "topology": options.topology,
    }


def fit(options: argparse.Namespace, name: str) -> tuple[bool, dict[str, float], dict[str, Curve]]:
    """Trains once, with ``"ddp"``, ``"topk"`` or a preset.

    Returns:
        Whether this is rank 0, the last logged values, and the series of all logged values.
    """
    L.seed_everything(options.seed, workers=True, verbose=False)
    train, test, classes = datasets(options.data, options.download)
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
    loader = {
        "batch_size": options.batch_size,
        "num_workers": options.loaders,
        "persistent_workers": options.loaders > 0,
    }
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            strategy=plugin,
            callbacks=[CompressionMonitor(details=True)] if compress else [],
            accelerator="gpu" if torch.cuda.is_available() else "cpu",
            devices=options.devices,
            num_nodes=options.num_nodes,
            max_epochs=options.max_epochs,
            limit_train_batches=options.limit_train_batches,
            logger=CSVLogger(folder, name="", version=""),
            log_every_n_steps=5,
            enable_checkpointing=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
        )
        trainer.fit(model, DataLoader(train, shuffle=True, drop_last=True, **loader), DataLoader(test, **loader))
        series = read_series(Path(folder) / "metrics.csv") if trainer.is_global_zero else {}
    values = {key: float(value) for key, value in trainer.callback_metrics.items()}
    if not compress:
        elements = sum(p.numel() for p in model.parameters() if p.requires_grad)
        workers = trainer.world_size
        values["topk/total_dense_bytes"] = values["steps"] * (2 * (workers - 1) * elements * 4 // workers)
    return trainer.is_global_zero, values, series


def read_series(path: Path) -> dict[str, tuple[list[float], list[float]]]:
    """Steps and values of each column of CSVLogger's file."""
    series: dict[str, tuple[list[float], list[float]]] = {}
    with path.open() as file:
        for row in csv.DictReader(file):
            for key, value in row.items():
                if value:
                    steps, values = series.setdefault(key, ([], []))
                    steps.append(float(row["step"]))
                    values.append(float(value))
    return series


def table(results: dict[str, dict[str, float]]) -> str:
    """The runs side by side. Bytes are those that rank 0 sent; saving and error cover the whole run."""
    lines = [f"{'strategy':<20}{'accuracy':>10}{'up':>10}{'down':>10}{'dense':>10}{'saving':>9}{'error':>8}"]
    for name, values in results.items():
        dense = values["topk/total_dense_bytes"]
        up, down = (values.get(f"topk/total_{way}_bytes") for way in ("uplink", "downlink"))
        error, saving = values.get("topk/average_error", 0.0), values.get("topk/saving", 1.0)
        cells = ["-" if sent is None else format_bytes(sent) for sent in (up, down)]
        lines.append(
            f"{name:<20}{values['accuracy']:>10.2%}{cells[0]:>10}{cells[1]:>10}{format_bytes(dense):>10}{saving:>8.1f}x"
            f"{error:>8.3f}"
        )
    return "\n".join(lines)


def plot(runs: dict[str, dict[str, Curve]], path: str) -> None:
    """Draws loss, bytes and compression error over steps, from the series that each run logged."""
    panels = [
        (Panel("training loss", "step", ylog=True), {"train_loss": ""}),
        (
            Panel("bytes sent by rank 0 so far", "step", ylog=True),
            {"topk/total_bytes": "", "topk/total_dense_bytes": "as a ring all-reduce"},
        ),
        (
            Panel("compression error ‖a - C(a)‖² / ‖a‖²", "step"),
            {"topk/uplink_error": "uplink", "topk/downlink_error": "downlink", "topk/bound": "(1 - k/d)²"},
        ),
    ]
    for panel, keys in panels:
        for run, series in runs.items():
            for key, label in keys.items():
                if key in series:
                    panel.curves[f"{run} {label}".strip()] = series[key]
    draw([panel for panel, _ in panels], path)


def parse() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", help="a folder with train/<class>/* and test/<class>/*, or 'cifar10' (default: digits)")
    add("--download", action="store_true", help="download CIFAR-10 to ./data if it is missing")
    add("--model", choices=list(MODELS), default="mlp", help="default: %(default)s")
    gpus = torch.cuda.device_count()
    add("--devices", type=int, default=gpus or 2, help="workers on each node (default: all GPUs, else 2 CPU processes)")
    add("--num-nodes", type=int, default=1, help="default: %(default)s")
    add("--strategy", choices=["topk", "ddp"], default="topk", help="default: %(default)s")
    add("--compare", action="store_true", help="train with topk and with ddp")
    add(
        "--preset",
        nargs="+",
        choices=list(presets),
        help="systems of the papers to train in turn, instead of the next options; of these only --ratio applies, "
        "except to dense and dgc (default: 0.01)",
    )
    add("--saving", type=float, help="how many times fewer bytes than all-reduce to send (default: 50)")
    add("--ratio", type=float, help="fraction of the entries that each worker sends, instead of --saving")
    add("--server-ratio", type=float, help="fraction of the entries that the servers send (default: the same)")
    add("--no-bidirectional", dest="bidirectional", action="store_false", help="servers send every nonzero entry")
    add("--topology", default="sharded", help="sharded, single_server or allgather (default: %(default)s)")
    add("--max-epochs", type=int, default=20, help="default: %(default)s")
    add("--batch-size", type=int, default=32, help="batch size per worker (default: %(default)s)")
    add("--lr", type=float, default=0.05, help="default: %(default)s")
    add("--loaders", type=int, default=0, help="data loading processes per worker (default: %(default)s)")
    add("--limit-train-batches", type=int, help="maximum number of batches per epoch")
    add("--seed", type=int, default=0, help="default: %(default)s")
    add("--plot", metavar="FILE", help="draw loss, bytes and compression error over steps")
    return parser.parse_args()


def main() -> None:
    """Trains, prints the table, draws the plot."""
    options = parse()
    names = options.preset or [options.strategy if not options.compare else "topk"]
    runs = {name: fit(options, name) for name in (["ddp", *names] if options.compare else names)}
    if not all(is_zero for is_zero, *_ in runs.values()):
        return  # another process prints
    print("\n" + table({name: values for name, (_, values, _) in runs.items()}))
    if options.plot:
        plot({name: series for name, (*_, series) in runs.items()}, options.plot)
        print(f"plot: {options.plot}")


if __name__ == "__main__":
    main()
