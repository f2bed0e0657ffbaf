"""Embedding tables: rows by id. A step reads and changes the rows of a few ids."""

from allred.embeddings.table_form import Normal as Normal
from allred.embeddings.table_form import Uniform as Uniform

__all__ = ["Normal", "Uniform"]
