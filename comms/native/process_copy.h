/* Copies between this process and another, by the kernel. One system call moves at most MOST_AT_ONCE bytes,
 * and may move less without an error, so `copy_pieces` repeats it until all bytes are moved. All copies go
 * through it. */

#ifndef HOLDFAST_PROCESS_COPY_H
#define HOLDFAST_PROCESS_COPY_H

#include <errno.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define MOST_AT_ONCE 0x7ffff000u /* MAX_RW_COUNT of a kernel with pages of 4 KiB */

/* Copy `count` pieces in order, the same sizes on both sides, from process `pid`, or to it if `writes`; at
 * most `most` bytes a system call. Returns the bytes moved. If that is not all, `failed` tells why: ESRCH,
 * EPERM, or EFAULT for memory that is not mapped. */
uint64_t copy_pieces(int pid, int writes, struct iovec *here, struct iovec *there, size_t count,
                     uint64_t most, int *failed);

#endif
