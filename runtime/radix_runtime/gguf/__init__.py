"""GGUF files, the format of llama.cpp: one file with a model's sizes, tokenizer and tensors. Loads
no torch.

header.py    the file's metadata and table of tensors, checked against its size
types.py     the types of its tensors
keys.py      what its metadata says, under the names of config.json
architectures.py    what that of an architecture says beyond it
mixtures.py  the same of models with experts
names.py     name rules from its tensors to those of a checkpoint of the same family"""

from .header import GgufFile, TensorEntry, is_gguf, open_gguf

__all__ = ["GgufFile", "TensorEntry", "is_gguf", "open_gguf"]
