"""Opening a file of a stranger's folder: only what is a file, and lies there itself. And the room
for what is made of it.

Not here: what is read from it (sources, formats).
"""

import errno
import os
import stat
from pathlib import Path

from adapter_store.errors import AdapterInvalid, AdapterNotFound, AdapterUnavailable


def reserve(fd: int, num_bytes: int) -> None:
    """Give an open file exactly this size, with its space really there: what is written later
    cannot stop half way.

    fd  open for reading too: where the file system cannot do it, libc does it block by block
    Errors: OSError.
    """
    os.ftruncate(fd, num_bytes)
    if num_bytes:
        os.posix_fallocate(fd, 0, num_bytes)


def open_regular(path: Path, folder_fd: int | None = None) -> int:
    """Open a file for reading and return its descriptor; the caller closes it.

    folder_fd  of the folder that a relative path starts from; None = the working folder
    Errors:  AdapterInvalid("file") for a link, folder, pipe, socket or device: a link could lead
             out of the adapter's folder. AdapterNotFound if there is none, AdapterUnavailable if it
             cannot be read.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(path, flags, dir_fd=folder_fd)
    except FileNotFoundError:
        raise AdapterNotFound(f"{path.name} is not in the adapter's folder") from None
    except OSError as error:
        if error.errno == errno.ELOOP:
            what = f"{path.name} is a symbolic link; put the file itself there"
            raise AdapterInvalid("file", what) from None
        if error.errno in (errno.ENXIO, errno.ENODEV):  # a socket, a device that is not there
            raise AdapterInvalid("file", f"{path.name} is not a regular file") from None
        raise AdapterUnavailable(f"{path.name}: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise AdapterInvalid("file", f"{path.name} is not a regular file")
    return fd
