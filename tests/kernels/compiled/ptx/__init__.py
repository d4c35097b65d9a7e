"""Runs on the CPU what Triton compiles for an NVIDIA GPU: the PTX of a kernel, for all of its threads at once, in NumPy.

    program     text -> basic blocks of instructions
    arithmetic  what PTX defines otherwise than NumPy
    opcodes     an instruction's name -> the types of its operands and the function that computes it
    steps       an instruction -> a step on the registers of warps
    memory      tensors and shared memory: bounds, alignment, loads, stores, atomic operations
    shadow      who touched each byte, and whether a barrier lies between
    machine     the warps of a launch, in an order that may be drawn
    counts      instructions, sectors and wavefronts that were executed
    findings    what no kernel may do, by kernel and line of its source

It proves what the compiler made of a kernel, up to the assembler. It knows nothing of time, of registers and their
spills, of streams, and of the order in which programs of a launch see each other's writes.
"""
