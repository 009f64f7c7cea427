/* What module.c puts together: the state of the module, and the types and functions of other files; and how
 * these read their arguments. */

#ifndef HOLDFAST_MODULE_H
#define HOLDFAST_MODULE_H

#include <Python.h>

#include "tensors.h"

/* The known tensor type, and types of its own. */
typedef struct {
    tensors known;
    PyObject *board, *order, *fast_path;
} state;

extern PyType_Spec board_spec, bounds_spec, calls_spec, fast_spec, op_call_spec, order_spec, prepared_spec,
    words_spec;

typedef PyObject *fast_function(PyObject *module, PyObject *const *args, Py_ssize_t count);
typedef PyObject *function(PyObject *module, PyObject *args);

fast_function copy_process, diff_pieces, digest_copies, float8_decode, float8_encode, patch_pieces;
function make_nans_alike, sum_exactly;

/* Arguments of compiled functions: addresses and numbers, by position. */
static inline int parse_numbers(PyObject *const *args, Py_ssize_t count, Py_ssize_t expected,
                                uint64_t *into) {
    if (count != expected) {
        PyErr_Format(PyExc_TypeError, "expected %zd arguments, got %zd", expected, count);
        return 0;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        into[i] = PyLong_AsUnsignedLongLong(args[i]);
        if (into[i] == (uint64_t)-1 && PyErr_Occurred())
            return 0;
    }
    return 1;
}

/* Check that `nbytes` bytes can lie at `address`; if not, set a Python error and return 0. */
static inline int is_memory(uint64_t address, uint64_t nbytes) {
    if (address || !nbytes)
        return 1;
    PyErr_Format(PyExc_ValueError, "%llu bytes at no address: a tensor without memory of its own",
                 (unsigned long long)nbytes);
    return 0;
}

/* The end of the destructor of a type of this module. */
static inline void free_object(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    freefunc free_ = (freefunc)PyType_GetSlot(type, Py_tp_free);
    free_(object);
    Py_DECREF(type);
}

#define FAST(NAME, FUNCTION)                                                                                 \
    { NAME, (PyCFunction)(void (*)(void))FUNCTION, METH_FASTCALL, NULL }
#define PLAIN(NAME, FUNCTION)                                                                                \
    { NAME, (PyCFunction)FUNCTION, METH_NOARGS, NULL }

#endif
