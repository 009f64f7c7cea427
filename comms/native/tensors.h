/* Where a tensor lies, without asking it attribute by attribute: torch tells it through DLPack's table of functions for C
 * (https://dmlc.github.io/dlpack/latest/python_spec.html, `__dlpack_c_exchange_api__`), of which what is used is declared
 * here as DLPack 1 has it. */

#ifndef HOLDFAST_TENSORS_H
#define HOLDFAST_TENSORS_H

#include <Python.h>
#include <stdint.h>

enum { DLPACK_MAJOR = 1, DLPACK_CPU = 1, DLPACK_COMPLEX = 5 };

typedef struct {
    char *data;
    int32_t device, device_number;
    int32_t ndim;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} dlpack_tensor;

typedef struct dlpack_api {
    uint32_t major, minor;
    struct dlpack_api *older;
    void *of_others[3];
    int (*describe)(PyObject *tensor, dlpack_tensor *into);
    void *current_stream;
} dlpack_api;

typedef struct {
    PyObject *type; /* of the tensors that are known: NULL until `know` */
    const dlpack_api *api;
    PyObject *requires_grad, *is_neg;
} tensors;

/* The tensors of `type` are described from now on. 0, or -1 with a Python error. */
static int know(tensors *known, PyObject *type) {
    PyObject *capsule = PyObject_GetAttrString(type, "__dlpack_c_exchange_api__");
    if (!capsule)
        return -1;
    const dlpack_api *api = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    Py_DECREF(capsule);
    while (api && api->major > DLPACK_MAJOR)
        api = api->older;
    if (PyErr_Occurred())
        return -1;
    if (!api || api->major != DLPACK_MAJOR || !api->describe) {
        PyErr_SetString(PyExc_ValueError, "it does not describe tensors as DLPack 1 does");
        return -1;
    }
    Py_INCREF(type);
    known->type = type, known->api = api;
    known->requires_grad = PyUnicode_InternFromString("requires_grad");
    known->is_neg = PyUnicode_InternFromString("is_neg");
    return known->requires_grad && known->is_neg ? 0 : -1;
}

/* Takes the reference; a question that failed is not answered with no. */
static int is_false(PyObject *answer) {
    int no = answer == Py_False;
    if (!answer)
        PyErr_Clear();
    Py_XDECREF(answer);
    return no;
}

/* Whether it is of a known type, and dense CPU memory in row-major order; then where it lies. */
static int lies_plainly(const tensors *known, PyObject *tensor, dlpack_tensor *where, uint64_t *nbytes) {
    if (!known->type || (PyObject *)Py_TYPE(tensor) != known->type)
        return 0;
    if (known->api->describe(tensor, where) < 0) {
        PyErr_Clear();
        return 0;
    }
    if (where->device != DLPACK_CPU || (where->ndim && where->strides[where->ndim - 1] != 1))
        return 0;
    int64_t count = 1;
    for (int i = where->ndim - 1; i >= 0; i--) {
        if (where->shape[i] != 1 && where->strides[i] != count)
            return 0;
        count *= where->shape[i];
    }
    *nbytes = (uint64_t)count * where->lanes * where->bits / 8;
    return where->data || !count;
}

/* Whether it is that, and its memory is what it says: not of lazily conjugated or negated numbers, of which DLPack does not
 * tell, nor one that autograd follows. */
static int is_plain(const tensors *known, PyObject *tensor, dlpack_tensor *where, uint64_t *nbytes) {
    if (!lies_plainly(known, tensor, where, nbytes) || where->code == DLPACK_COMPLEX)
        return 0;
    return is_false(PyObject_GetAttr(tensor, known->requires_grad)) &&
           is_false(PyObject_CallMethodObjArgs(tensor, known->is_neg, NULL));
}

/* Its address and size in bytes; as torch says where it does not lie plainly. 0, or -1 with a Python error. */
static int find_tensor(const tensors *known, PyObject *tensor, char **data, uint64_t *nbytes) {
    dlpack_tensor where;
    if (lies_plainly(known, tensor, &where, nbytes)) {
        *data = where.data;
        return 0;
    }
    PyObject *address = PyObject_CallMethod(tensor, "data_ptr", NULL);
    PyObject *size = address ? PyObject_GetAttrString(tensor, "nbytes") : NULL;
    if (size)
        *data = PyLong_AsVoidPtr(address), *nbytes = PyLong_AsUnsignedLongLong(size);
    Py_XDECREF(address);
    Py_XDECREF(size);
    return PyErr_Occurred() ? -1 : 0;
}

/* The same as a tuple. */
static PyObject *span_of_tensor(const tensors *known, PyObject *tensor) {
    char *data;
    uint64_t nbytes;
    if (find_tensor(known, tensor, &data, &nbytes) < 0)
        return NULL;
    PyObject *address = PyLong_FromVoidPtr(data), *size = PyLong_FromUnsignedLongLong(nbytes);
    PyObject *flat = address && size ? PyTuple_Pack(2, address, size) : NULL;
    Py_XDECREF(address);
    Py_XDECREF(size);
    return flat;
}

/* What the module keeps: the tensors that are known, and types of its own. */
typedef struct {
    tensors known;
    PyObject *board, *order;
} state;

#endif
