"""Compiles a device source with NVRTC, with no include path beyond INCLUDE: the sources need no toolkit header.

nvrtc.py CUDA INCLUDE SOURCE. Warnings and spills fail.
"""

import ctypes
import glob
import re
import sys

cuda, include, source = sys.argv[1:]
lib = ctypes.CDLL(glob.glob(f"{cuda}/lib/libnvrtc.so.13")[0])
program = ctypes.c_void_p()
text = open(source, "rb").read()
assert lib.nvrtcCreateProgram(ctypes.byref(program), text, source.encode(), 0, None, None) == 0
options = [b"--gpu-architecture=sm_90a", b"--std=c++17", b"-I" + include.encode(), b"--ptxas-options=-v"]
code = lib.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
size = ctypes.c_size_t()
lib.nvrtcGetProgramLogSize(program, ctypes.byref(size))
buffer = ctypes.create_string_buffer(size.value)
lib.nvrtcGetProgramLog(program, buffer)
log = buffer.value.decode()
spills = [n for pair in re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log) for n in pair if n != "0"]
if code or spills or "warning" in log or "spill stores" not in log:
    sys.exit(f"{source}: NVRTC result {code}\n{log[:4000]}")
