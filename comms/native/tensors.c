#define PY_SSIZE_T_CLEAN
#include "tensors.h"

/* The offset in a tensor's object of the pointer that it shows as `_cdata`; -1 if it is not in the first
 * words. */
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

int learn_tensor_type(tensors *known, PyObject *example, uint64_t storage_nbytes, uint64_t storage_offset,
                      uint64_t scalar_type, PyObject *locate) {
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
    known->dtype = PyUnicode_InternFromString("dtype");
    if (!known->requires_grad || !known->is_neg || !known->dtype)
        return -1;
    known->implementation = find_implementation(example);
    if (known->implementation < 0) {
        PyErr_SetString(PyExc_ValueError,
                        "it does not hold its implementation as tensors of a known torch do");
        return -1;
    }
    known->storage_nbytes = (tensor_number)(uintptr_t)storage_nbytes;
    known->storage_offset = (tensor_number)(uintptr_t)storage_offset;
    known->scalar_type = (tensor_kind)(uintptr_t)scalar_type;
    known->type = Py_NewRef(type), known->locate = Py_NewRef(locate), known->api = api;
    return 0;
}

int is_false(PyObject *answer) {
    int no = answer == Py_False;
    Py_XDECREF(answer);
    return no;
}

int32_t scalar_type(const tensors *known, PyObject *tensor) {
    int32_t type;
    return known->scalar_type((char *)tensor + known->implementation, &type) ? -1 : type;
}

/* Whether the storage still holds that many bytes from the offset: it may have been resized or freed. */
static int is_covered(const tensors *known, PyObject *tensor, uint64_t itemsize, uint64_t nbytes) {
    void *handle = (char *)tensor + known->implementation;
    int64_t held, offset;
    return !known->storage_nbytes(handle, &held) && !known->storage_offset(handle, &offset) &&
           (uint64_t)offset * itemsize + nbytes <= (uint64_t)held;
}

int is_dense(const tensors *known, PyObject *tensor, dlpack_device on, dlpack_tensor *where,
             uint64_t *nbytes) {
    if (!known->type || (PyObject *)Py_TYPE(tensor) != known->type)
        return 0;
    if (known->api->describe(tensor, where) < 0) {
        PyErr_Clear();
        return 0;
    }
    if (where->device != on.kind || (on.kind != DLPACK_CPU && where->device_number != on.number))
        return 0;
    if (where->ndim && where->strides[where->ndim - 1] != 1)
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

int is_plain(const tensors *known, PyObject *tensor, dlpack_device on, dlpack_tensor *where,
             uint64_t *nbytes) {
    if (!is_dense(known, tensor, on, where, nbytes) || where->code == DLPACK_COMPLEX)
        return 0;
    return is_false(PyObject_GetAttr(tensor, known->requires_grad)) &&
           is_false(PyObject_CallMethodObjArgs(tensor, known->is_neg, NULL));
}

int find_tensor(const tensors *known, PyObject *tensor, char **data, uint64_t *nbytes) {
    dlpack_tensor where;
    if (is_dense(known, tensor, on_cpu, &where, nbytes)) {
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

PyObject *span_of_tensor(const tensors *known, PyObject *tensor) {
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

PyObject *describe_tensors(const tensors *known, PyObject *list) {
    if (!PyList_Check(list)) {
        PyErr_SetString(PyExc_TypeError, "expected a list of tensors");
        return NULL;
    }
    Py_ssize_t count = PyList_Size(list), used = 0, room = 0;
    PyObject *spans = PyBytes_FromStringAndSize(NULL, count * 16), *both = NULL;
    char *forms = NULL;
    for (Py_ssize_t i = 0; spans && i < count; i++) {
        PyObject *tensor =
            Py_NewRef(PyList_GetItem(list, i)); /* `is_plain` may call Python, which may change the list */
        dlpack_tensor where;
        uint64_t span[2];
        PyObject *dtype =
            is_plain(known, tensor, on_cpu, &where, &span[1]) ? PyObject_GetAttr(tensor, known->dtype) : NULL;
        int found = dtype && PyList_Size(list) == count;
        Py_XDECREF(dtype); /* there is one object for each dtype, for good */
        if (found) {
            Py_ssize_t more = 12 + 8 * (Py_ssize_t)where.ndim;
            if (used + more > room) {
                char *larger = realloc(forms, (size_t)(room = 2 * (used + more) + 16 * count));
                if (!larger) {
                    Py_DECREF(tensor);
                    PyErr_NoMemory();
                    goto done;
                }
                forms = larger;
            }
            span[0] = (uintptr_t)where.data;
            memcpy(PyBytes_AsString(spans) + 16 * i, span, 16);
            memcpy(forms + used, &dtype, 8); /* DLPack does not tell int4 from int8 */
            memcpy(forms + used + 8, &where.ndim, 4);
            memcpy(forms + used + 12, where.shape, 8 * (size_t)where.ndim);
            used += more;
        }
        Py_DECREF(tensor);
        if (!found) {
            both = PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
            goto done;
        }
    }
    PyObject *encoded = spans ? PyBytes_FromStringAndSize(forms, used) : NULL;
    both = encoded ? PyTuple_Pack(2, spans, encoded) : NULL;
    Py_XDECREF(encoded);
done:
    free(forms);
    Py_XDECREF(spans);
    return both;
}
