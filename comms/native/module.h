/* What module.c puts together: the state of the module, and the types and functions that stand in other
 * files.
 */

#ifndef HOLDFAST_MODULE_H
#define HOLDFAST_MODULE_H

#include <Python.h>

#include "arguments.h"
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

#endif
