"""A process that owns memory of a GPU: prints its handle, then does what comes in, one line each.

put BYTE   fill it;   get   print its bytes as hex;   sum   print their sum
"""

from __future__ import annotations

import base64
import ctypes
import sys


def main(index: int, nbytes: int) -> None:
    cuda = ctypes.CDLL("libcuda.so.1")

    def call(name: str, *arguments: object) -> None:
        code = getattr(cuda, name)(*arguments)
        if code:
            raise SystemExit(f"{name}: {code}")

    device, context, address = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
    call("cuInit", 0)
    call("cuDeviceGet", ctypes.byref(device), index)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    call("cuCtxSetCurrent", context)
    call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(nbytes))
    handle = (ctypes.c_ubyte * 64)()
    call("cuIpcGetMemHandle", handle, address)
    print(base64.b64encode(bytes(handle)).decode(), flush=True)
    host = (ctypes.c_ubyte * nbytes)()
    for line in sys.stdin:
        word, _, value = line.strip().partition(" ")
        if word == "put":
            ctypes.memset(host, int(value), nbytes)
            call("cuMemcpyHtoD_v2", address, host, ctypes.c_size_t(nbytes))
            print("done", flush=True)
        else:
            call("cuMemcpyDtoH_v2", host, address, ctypes.c_size_t(nbytes))
            print(bytes(host).hex() if word == "get" else sum(bytes(host)), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
