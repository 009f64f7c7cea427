/* holdfast.comms._native: waits, small and large ops on a board of shared memory, without the interpreter.
 *
 * This module makes no decisions: Python chooses the ops and their algorithms, and decides what a missing
 * rank means. Everything that may take longer than a microsecond releases the GIL, but `read_unlocked`. */

#define PY_SSIZE_T_CLEAN
#include "module.h"

#include <errno.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "board/run_op.h"

/* -- without a board */

/* kind(dtype, op): the number of a reduction, -1 if it does not exist. */
static PyObject *kind(PyObject *module, PyObject *args) {
    (void)module;
    const char *dtype, *op;
    if (!PyArg_ParseTuple(args, "ss", &dtype, &op))
        return NULL;
    return PyLong_FromLong(kind_of(dtype, op));
}

/* combine(kind, out, a, b, count): out = a op b, for `count` numbers at these addresses. */
static PyObject *combine_(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    uint64_t a[5];
    if (!parse_numbers(args, count, 5, a))
        return NULL;
    kernel combine = kernel_of((long)a[0]);
    if (!combine) {
        PyErr_SetString(PyExc_ValueError, "no such reduction");
        return NULL;
    }
    for (int i = 1; i < 4; i++)
        if (!is_memory(a[i], a[4]))
            return NULL;
    Py_BEGIN_ALLOW_THREADS;
    combine((void *)(uintptr_t)a[1], (const void *)(uintptr_t)a[2], (const void *)(uintptr_t)a[3], a[4]);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

/* copy(into, from, nbytes): copy between two addresses of this process; nothing if they are equal. */
static PyObject *copy_(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    uint64_t a[3];
    if (!parse_numbers(args, count, 3, a) || !is_memory(a[0], a[2]) || !is_memory(a[1], a[2]))
        return NULL;
    span into = {(char *)(uintptr_t)a[0], a[2]};
    move(into, (const void *)(uintptr_t)a[1]);
    Py_RETURN_NONE;
}

/* read_unlocked(descriptor): the content of a file; None while it is locked (flock) by a process that writes
 * to it. Keeps the GIL: torch's FileStore waits for that lock with the GIL, so that a thread which had the
 * lock here and waited for the GIL would wait forever. */
static PyObject *read_unlocked(PyObject *module, PyObject *descriptor) {
    (void)module;
    long number = PyLong_AsLong(descriptor);
    int file = (int)number;
    if (number == -1 && PyErr_Occurred())
        return NULL;
    if (flock(file, LOCK_SH | LOCK_NB) < 0) {
        if (errno == EWOULDBLOCK)
            Py_RETURN_NONE;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    struct stat about;
    Py_ssize_t size = fstat(file, &about) < 0 ? -1 : (Py_ssize_t)about.st_size, done = 0, got = 0;
    PyObject *content =
        size < 0 ? PyErr_SetFromErrno(PyExc_OSError) : PyBytes_FromStringAndSize(NULL, size);
    while (content && done < size) {
        got = pread(file, PyBytes_AsString(content) + done, (size_t)(size - done), done);
        if (got > 0) {
            done += got;
            continue;
        }
        errno = got < 0 ? errno : EIO; /* a process that takes no lock has cut it off */
        Py_DECREF(content);
        content = PyErr_SetFromErrno(PyExc_OSError);
    }
    flock(file, LOCK_UN); /* now: a child that is forked later would hold it on */
    return content;
}

/* -- tensors */

static tensors *known_to(PyObject *module) { return &((state *)PyModule_GetState(module))->known; }

/* register_tensor_type(example, storage_nbytes, storage_offset, scalar_type, locate): set the tensor type for
 * which `plain` and `span` are fast, the addresses of torch's functions for its storage and dtype, and the
 * function that locates all other tensors. */
static PyObject *register_tensor_type(PyObject *module, PyObject *args) {
    PyObject *example, *locate;
    unsigned long long storage_nbytes, storage_offset, scalar_type;
    if (!PyArg_ParseTuple(args, "OKKKO", &example, &storage_nbytes, &storage_offset, &scalar_type, &locate) ||
        learn_tensor_type(known_to(module), example, storage_nbytes, storage_offset, scalar_type, locate) < 0)
        return NULL;
    Py_RETURN_NONE;
}

/* plain(tensor[, kind, number]): whether it is dense memory of that device (the CPU) in row-major order that
 * can be used directly. */
static PyObject *plain(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    dlpack_tensor where;
    dlpack_device device = on_cpu;
    uint64_t nbytes;
    if (count != 1 && count != 3) {
        PyErr_Format(PyExc_TypeError, "expected 1 or 3 arguments, got %zd", count);
        return NULL;
    }
    if (count == 3) {
        device.kind = (int32_t)PyLong_AsLong(args[1]), device.number = (int32_t)PyLong_AsLong(args[2]);
        if (PyErr_Occurred())
            return NULL;
    }
    int yes = is_plain(known_to(module), args[0], device, &where, &nbytes);
    return !yes && PyErr_Occurred() ? NULL : PyBool_FromLong(yes);
}

/* span(tensor): (address, nbytes). */
static PyObject *span_(PyObject *module, PyObject *tensor) {
    return span_of_tensor(known_to(module), tensor);
}

/* describe(list): (spans, forms) of plain tensors; None if one is not plain. */
static PyObject *describe(PyObject *module, PyObject *list) {
    return describe_tensors(known_to(module), list);
}

static PyMethodDef module_methods[] = {
    {"kind", kind, METH_VARARGS, NULL},
    FAST("combine", combine_),
    FAST("copy", copy_),
    FAST("copy_process", copy_process),
    FAST("diff_pieces", diff_pieces),
    FAST("patch_pieces", patch_pieces),
    FAST("digest_copies", digest_copies),
    FAST("float8_encode", float8_encode),
    FAST("float8_decode", float8_decode),
    {"sum_exactly", sum_exactly, METH_VARARGS, NULL},
    {"register_tensor_type", register_tensor_type, METH_VARARGS, NULL},
    FAST("plain", plain),
    {"read_unlocked", read_unlocked, METH_O, NULL},
    {"span", span_, METH_O, NULL},
    {"describe", describe, METH_O, NULL},
    {"make_nans_alike", make_nans_alike, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

/* 0, or -1 with a Python error. `keep`, if given, gets the reference. */
static int add_type(PyObject *module, const char *name, PyType_Spec *spec, PyObject **keep) {
    PyObject *type = PyType_FromModuleAndSpec(module, spec, NULL);
    if (!type || PyModule_AddObjectRef(module, name, type) < 0) {
        Py_XDECREF(type);
        return -1;
    }
    if (keep)
        *keep = type;
    else
        Py_DECREF(type);
    return 0;
}

static int module_exec(PyObject *module) {
    state *made = PyModule_GetState(module);
    return add_type(module, "Board", &board_spec, &made->board) ||
                   add_type(module, "Order", &order_spec, &made->order) ||
                   add_type(module, "FastPath", &fast_spec, &made->fast_path) ||
                   add_type(module, "PreparedOp", &prepared_spec, NULL) ||
                   add_type(module, "OpCall", &op_call_spec, NULL) ||
                   add_type(module, "ActiveCalls", &calls_spec, NULL) ||
                   add_type(module, "WindowBounds", &bounds_spec, NULL) ||
                   add_type(module, "Words", &words_spec, NULL)
               ? -1
               : 0;
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, module_exec},
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_native", NULL, sizeof(state), module_methods, module_slots, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&definition); }
