"""The laboratory: benchmarks and the reproduction of the papers' claims, run by ``python examples/lab``.

May import everything but ``lightning_topk.adapters.lightning``. The examples import its models and data.
"""
