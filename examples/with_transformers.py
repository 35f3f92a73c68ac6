"""Top-k exchange in Hugging Face's Trainer (``pip install transformers accelerate``): import :class:`TopK`.

torchrun --nproc-per-node=2 examples/with_transformers.py
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from lightning_topk import attach


class TopK(TrainerCallback):
    """Compresses a Trainer's gradients: ``trainer.add_callback(TopK(trainer, saving=50))``.

    The Trainer's checkpoints have no residuals: a resumed run starts with zero residuals.

    Args:
        trainer: The Trainer. It passes the bare model to its callbacks; the DDP model is its ``model_wrapped``.
        **settings: Settings of :func:`lightning_topk.attach`.
    """

    def __init__(self, trainer: Trainer, **settings: Any) -> None:
        self.trainer, self.settings = trainer, settings
        self.state: Any = None

    def on_train_begin(self, args: TrainingArguments, *others: Any, **kwargs: Any) -> None:
        """Attaches the exchange to the DDP model."""
        if self.state is not None:  # auto_find_batch_size restarts without on_train_end
            self.state.close()
        trainer = self.trainer
        given = {"optimizer": trainer.optimizer.optimizer, "scaler": trainer.accelerator.scaler}
        given["max_norm"] = args.max_grad_norm or None  # 0 does not clip
        self.state = attach(trainer.model_wrapped, **given, **self.settings)

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """Closes the exchange's state."""
        self.state.close()


def main() -> None:
    """Trains a tiny GPT-2 on random tokens."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=16, n_embd=64, n_layer=1, n_head=2))
    data = [{"input_ids": row, "labels": row} for row in torch.randint(50, (64, 16))]
    options = {"logging_strategy": "no", "save_strategy": "no", "report_to": "none", "disable_tqdm": True}
    arguments = TrainingArguments("out", max_steps=8, use_cpu=not torch.cuda.is_available(), **options)
    trainer = Trainer(model, arguments, train_dataset=data)
    compression = TopK(trainer, saving=50)
    trainer.add_callback(compression)
    trainer.train()
    trainer.accelerator.print(compression.state.summary())


if __name__ == "__main__":
    main()
