"""Executes AMD's machine code on the CPU, behind a stand-in of `libamdhip64`.

`src/` is C++: a decoder over LLVM's disassembly, the instructions, the HIP functions. `library.py`
builds it, `arrays.py` are the arrays that say they lie on a GPU.
"""
