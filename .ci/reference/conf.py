"""How Sphinx makes the reference of the public names: see CONTRIBUTING.md."""

from lightning_topk import __version__

project, author, release = "lightning_topk", "the lightning_topk developers", __version__
extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.intersphinx", "sphinx.ext.viewcode"]
intersphinx_mapping = {
    "python": ("https://docs.python.org/3", None),
    "torch": ("https://docs.pytorch.org/docs/stable", None),
    "lightning": ("https://lightning.ai/docs/pytorch/stable", None),
    "torchmetrics": ("https://lightning.ai/docs/torchmetrics/stable", None),
}
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_member_order = "bysource"
default_role = "literal"
html_theme = "furo"
