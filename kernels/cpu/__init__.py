"""Kernels for x86-64 processors: a whole forward pass in one call of C++.

    native/     the kernels: simd.h (what an instruction set is), tile.h (the inner loop of every
                product), linear.h, rows.h, experts.h, cache.h (keys and values), attention.h,
                program.cc (runs a step), team.cc (threads)
    build.py    compiles them at set-up, once for each instruction set
    library.py  loads the best that the processor has
    program.py  records what a model computes, and runs it

Nothing here imports torch.
"""
