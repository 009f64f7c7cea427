/* Where a tensor lies, without asking it attribute by attribute: torch tells it through DLPack's table of functions for C
 * (https://dmlc.github.io/dlpack/latest/python_spec.html, `__dlpack_c_exchange_api__`), of which what is used is declared
 * here as DLPack 1 has it. How large its storage is now, which `resize_` changes, DLPack does not tell: two functions of
 * torch's stable C interface do (torch/csrc/inductor/aoti_torch/c/shim.h), whose handle is the address of a pointer to the
 * tensor's implementation: that which the Python object holds. */

#ifndef HOLDFAST_TENSORS_H
#define HOLDFAST_TENSORS_H

#include <Python.h>
#include <stdint.h>
#include <string.h>

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

/* 0, or an error of torch's. */
typedef int32_t (*tensor_number)(void *handle, int64_t *into);

typedef struct {
    PyObject *type; /* of the tensors that are known: NULL until `know` */
    const dlpack_api *api;
    tensor_number storage_nbytes, storage_offset;
    PyObject *locate; /* the address and size of a tensor of any other kind, or an error */
    PyObject *requires_grad, *is_neg;
    Py_ssize_t implementation; /* where in the Python object the pointer to the tensor's implementation is */
} tensors;

/* Where in a tensor's object the pointer is that it calls `_cdata`; -1 if not among the first words. */
static Py_ssize_t find_implementation(PyObject *tensor) {
    PyObject *number = PyObject_GetAttrString(tensor, "_cdata");
    void *implementation = number ? PyLong_AsVoidPtr(number) : NULL;
    Py_XDECREF(number);
    for (size_t word = 0; implementation && word < 3; word++) {
        size_t at = sizeof(PyObject) + word * sizeof(void *);
        if (!memcmp((char *)tensor + at, &implementation, sizeof implementation))
            return (Py_ssize_t)at;
    }
    PyErr_Clear();
    return -1;
}

/* Tensors of the type of `example` are described from now on. 0, or -1 with a Python error. */
static int learn_tensor_type(tensors *known, PyObject *example, uint64_t storage_nbytes, uint64_t storage_offset, PyObject *locate) {
    PyObject *type = (PyObject *)Py_TYPE(example);
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
    known->requires_grad = PyUnicode_InternFromString("requires_grad");
    known->is_neg = PyUnicode_InternFromString("is_neg");
    if (!known->requires_grad || !known->is_neg)
        return -1;
    known->implementation = find_implementation(example);
    if (known->implementation < 0) {
        PyErr_SetString(PyExc_ValueError, "it does not hold its implementation as tensors of a known torch do");
        return -1;
    }
    known->storage_nbytes = (tensor_number)(uintptr_t)storage_nbytes;
    known->storage_offset = (tensor_number)(uintptr_t)storage_offset;
    known->type = Py_NewRef(type), known->locate = Py_NewRef(locate), known->api = api;
    return 0;
}

/* Takes the reference; a question that failed is not answered with no. */
static int is_false(PyObject *answer) {
    int no = answer == Py_False;
    if (!answer)
        PyErr_Clear();
    Py_XDECREF(answer);
    return no;
}

/* Whether its storage holds so many bytes from where it begins: it may have been resized, or freed. */
static int is_covered(const tensors *known, PyObject *tensor, uint64_t itemsize, uint64_t nbytes) {
    void *handle = (char *)tensor + known->implementation;
    int64_t held, offset;
    return !known->storage_nbytes(handle, &held) && !known->storage_offset(handle, &offset) &&
           (uint64_t)offset * itemsize + nbytes <= (uint64_t)held;
}

/* Whether it is of a known type, and dense CPU memory in row-major order, all of it there; then where it lies. */
static int is_dense(const tensors *known, PyObject *tensor, dlpack_tensor *where, uint64_t *nbytes) {
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
    uint64_t itemsize = (uint64_t)where->lanes * where->bits / 8;
    *nbytes = (uint64_t)count * itemsize;
    return !count || (where->data && is_covered(known, tensor, itemsize, *nbytes));
}

/* Whether it is that, and its memory is what it says: not of lazily conjugated or negated numbers, of which DLPack does not
 * tell, nor one that autograd follows. */
static int is_plain(const tensors *known, PyObject *tensor, dlpack_tensor *where, uint64_t *nbytes) {
    if (!is_dense(known, tensor, where, nbytes) || where->code == DLPACK_COMPLEX)
        return 0;
    return is_false(PyObject_GetAttr(tensor, known->requires_grad)) &&
           is_false(PyObject_CallMethodObjArgs(tensor, known->is_neg, NULL));
}

/* Its address and size in bytes; of one that does not lie plainly, Python says them. 0, or -1 with a Python error. */
static int find_tensor(const tensors *known, PyObject *tensor, char **data, uint64_t *nbytes) {
    dlpack_tensor where;
    if (is_dense(known, tensor, &where, nbytes)) {
        *data = where.data;
        return 0;
    }
    PyObject *found = known->locate ? PyObject_CallFunctionObjArgs(known->locate, tensor, NULL) : NULL;
    if (!known->locate)
        PyErr_SetString(PyExc_RuntimeError, "no tensors are known");
    if (!found)
        return -1;
    unsigned long long address, size;
    int taken = PyArg_ParseTuple(found, "KK", &address, &size);
    Py_DECREF(found);
    *data = (char *)(uintptr_t)address, *nbytes = size;
    return taken ? 0 : -1;
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
