"""The laboratory: benchmarks and the reproduction of the papers' claims, run by ``python -m lightning_topk``.

May import: everything but the ``lightning`` wing. Only ``__main__`` and the examples, for models and data, import it.
"""
