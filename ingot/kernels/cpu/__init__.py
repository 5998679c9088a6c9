"""The `cpu` provider: C++ for float32 and bfloat16, exact and at memory speed.

Each family has a source here, `<family>.cpp`, and a module that registers its kernels,
`<family>.py`. `vector.h` has the arithmetic, one header for all ISA tiers; `tensor.h` what lies
between torch and a kernel. `build.py` builds a family on its first use.

Exact means that each element is computed in one order that depends on the op and the tier alone.
So kernels are parallel over rows, columns, heads, never over what is added up, and the end of a
row goes through the same vector arithmetic as its middle, with zeros in the lanes that are over.
"""
