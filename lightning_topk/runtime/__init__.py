"""Runs the exchange during backward, for any wrapper: groups, lanes, residuals, optimizers.

May import: ``core``, the settings (``config``, ``schedule``, ``bucket``), ``volume`` and ``torch.distributed``. It uses
neither DDP nor Lightning.
"""
