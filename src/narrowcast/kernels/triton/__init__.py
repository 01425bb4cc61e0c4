"""The same bytes on GPUs, in Triton. Nothing here is imported before the first CUDA tensor comes.

| file | what it holds |
|---|---|
| recipe.py | a plan as plain numbers: what a kernel is compiled for |
| bits.py | floats as patterns, sums by a halving tree, random bits |
| codes.py | a scaled value to its code, and back |
| planes.py | codes and scales in the bytes of a wire |
| rotation.py | blocks rotated, and values read from a wire |
| spikes.py | the largest of each block apart |
| scales.py | the scale of a block |
| packing.py packed_sum.py | codes to whole words, and sums of wires word by word |
| fp4_sum.py | sums of wires of 4-bit floats |
| encode.py decode.py rounding.py matmul.py matmul_steps.py | the kernels |
| sparse.py transforms.py | kernels of transforms, and what launches them around the inner plan's |
| shapes.py | how large tiles are, and which ways through a kernel they allow |
| launch.py | what the ops call: grids, scratch memory, launches |
"""
