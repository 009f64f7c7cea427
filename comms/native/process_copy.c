#define PY_SSIZE_T_CLEAN
#include "process_copy.h"
#include "module.h"

enum { MOST_PIECES = 8 };

uint64_t copy_pieces(int pid, int writes, struct iovec *here, struct iovec *there, size_t count,
                     uint64_t most, int *failed) {
    uint64_t done = 0;
    *failed = 0;
    while (count) {
        if (!here->iov_len) {
            here++, there++, count--;
            continue;
        }
        uint64_t room = most;
        size_t whole = 0;
        while (whole < count && here[whole].iov_len <= room)
            room -= here[whole++].iov_len;
        size_t pieces = whole + (whole < count && room), cut = whole < pieces ? here[whole].iov_len : 0;
        if (cut)
            here[whole].iov_len = there[whole].iov_len = room;
        long got = syscall(writes ? SYS_process_vm_writev : SYS_process_vm_readv, pid, here, pieces, there,
                           pieces, 0);
        if (cut)
            here[whole].iov_len = there[whole].iov_len = cut;
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0) {
            *failed = got < 0 ? errno : EFAULT;
            return done;
        }
        done += (uint64_t)got;
        for (size_t left = (size_t)got; left;) {
            size_t of_this = left < here->iov_len ? left : here->iov_len;
            here->iov_base = (char *)here->iov_base + of_this, here->iov_len -= of_this;
            there->iov_base = (char *)there->iov_base + of_this, there->iov_len -= of_this;
            left -= of_this;
            if (!here->iov_len)
                here++, there++, count--;
        }
    }
    return done;
}

/* copy_process(pid, writes, most, here, there, nbytes, ...): see `copy_pieces`. OSError if nothing could be
 * moved. */
PyObject *copy_process(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    uint64_t a[3 + 3 * MOST_PIECES], wanted = 0, done;
    struct iovec here[MOST_PIECES], there[MOST_PIECES];
    size_t pieces = count > 3 ? (size_t)(count - 3) / 3 : 0;
    int failed;
    if (pieces > MOST_PIECES || count != 3 + 3 * (Py_ssize_t)pieces) {
        PyErr_Format(PyExc_TypeError, "expected at most %d pieces of three numbers each", MOST_PIECES);
        return NULL;
    }
    if (!parse_numbers(args, count, count, a))
        return NULL;
    for (size_t i = 0; i < pieces; i++) {
        const uint64_t *piece = a + 3 + 3 * i;
        here[i] = (struct iovec){(void *)(uintptr_t)piece[0], piece[2]};
        there[i] = (struct iovec){(void *)(uintptr_t)piece[1], piece[2]};
        wanted += piece[2];
    }
    if (!a[2]) {
        PyErr_SetString(PyExc_ValueError, "the largest copy must be of at least one byte");
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS;
    done = copy_pieces((int)a[0], a[1] != 0, here, there, pieces, a[2], &failed);
    Py_END_ALLOW_THREADS;
    if (wanted && !done) {
        errno = failed;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    return PyLong_FromUnsignedLongLong(done);
}
