/* Arguments of compiled functions: addresses and numbers, by position. */

#ifndef HOLDFAST_ARGUMENTS_H
#define HOLDFAST_ARGUMENTS_H

#include <Python.h>
#include <stdint.h>

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

#define FAST(NAME, FUNCTION) {NAME, (PyCFunction)(void (*)(void))FUNCTION, METH_FASTCALL, NULL}
#define PLAIN(NAME, FUNCTION) {NAME, (PyCFunction)FUNCTION, METH_NOARGS, NULL}

#endif
