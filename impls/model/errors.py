"""The one error of the model room, and the lazy import of its optional packages."""

from __future__ import annotations

import importlib
from typing import Any


class ModelError(ValueError):
    """A model, tokenizer or file that cannot be used as asked; the message names it and the way out."""


def need(module: str) -> Any:
    """Import a package of the `models` extra, or say how to install it.

    Raises:
        ModelError: the package is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        top = module.partition(".")[0]
        raise ModelError(
            f"reading this model needs the package {top!r}, which cannot be imported ({error}); "
            f"install it with: python -m pip install 'pairbench[models]'  (or: python -m pip install {top})"
        ) from error
