/* Find the memory of a tensor without reading its attributes one by one. torch describes it through DLPack's
 * table of C functions (https://dmlc.github.io/dlpack/latest/python_spec.html, `__dlpack_c_exchange_api__`);
 * the used part of DLPack 1 is declared here. DLPack does not tell the current size of the storage, which
 * `resize_` changes, and gives several dtypes one code (int4 and int8): functions of torch's stable C
 * interface tell both (torch/csrc/inductor/aoti_torch/c/shim.h). Their handle is the address of the pointer
 * to the tensor's implementation in the Python object. */

#ifndef HOLDFAST_TENSORS_H
#define HOLDFAST_TENSORS_H

#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { DLPACK_MAJOR = 1, DLPACK_CPU = 1, DLPACK_COMPLEX = 5 };

/* Where tensors have to be, as DLPack numbers devices; the number counts for other devices than the CPU. */
typedef struct {
    int32_t kind, number;
} dlpack_device;

static const dlpack_device on_cpu = {DLPACK_CPU, 0};

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

/* Returns 0, or an error of torch's. */
typedef int32_t (*tensor_number)(void *handle, int64_t *into);
typedef int32_t (*tensor_kind)(void *handle, int32_t *into);

typedef struct {
    PyObject *type; /* the tensor type; NULL until `learn_tensor_type` */
    const dlpack_api *api;
    tensor_number storage_nbytes, storage_offset;
    tensor_kind scalar_type;
    PyObject *locate; /* returns the address and size of any other tensor, or raises */
    PyObject *requires_grad, *is_neg, *dtype;
    Py_ssize_t implementation; /* offset in the Python object of the pointer to the tensor's implementation */
} tensors;

/* Describe tensors of the type of `example` from now on. 0, or -1 with a Python error. */
int learn_tensor_type(tensors *known, PyObject *example, uint64_t storage_nbytes, uint64_t storage_offset,
                      uint64_t scalar_type, PyObject *locate);

/* Whether an attribute or a result is False. Takes the reference; 0 for an error, which stays set: it may be
 * a signal's. */
int is_false(PyObject *answer);

/* What torch calls the dtype of a tensor of the known type; -1 if it does not tell. */
int32_t scalar_type(const tensors *known, PyObject *tensor);

/* Whether the tensor is of the known type, and dense memory of the device in row-major order that its storage
 * covers; then `where` describes it. */
int is_dense(const tensors *known, PyObject *tensor, dlpack_device on, dlpack_tensor *where,
             uint64_t *nbytes);

/* Whether it is dense, outside autograd, and holds the numbers themselves; 0 with a Python error if a
 * signal's handler raised one. DLPack does not tell of lazily conjugated or negated tensors. */
int is_plain(const tensors *known, PyObject *tensor, dlpack_device on, dlpack_tensor *where,
             uint64_t *nbytes);

/* Find the address and size in bytes; Python locates tensors that are not dense. 0, or -1 with a Python
 * error. */
int find_tensor(const tensors *known, PyObject *tensor, char **data, uint64_t *nbytes);

/* The same as a tuple. */
PyObject *span_of_tensor(const tensors *known, PyObject *tensor);

/* Two bytes objects that describe a list of plain tensors: address and size in bytes of each, as 64-bit
 * numbers; and the object of its dtype (64 bits), number of dimensions (32 bits) and shape (64 bits a
 * dimension). None if one is not plain. NULL with a Python error. */
PyObject *describe_tensors(const tensors *known, PyObject *list);

#endif
