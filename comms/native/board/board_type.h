/* The `Board` type of Python: its creation and release, its flags, waits and ops. */

#ifndef HOLDFAST_BOARD_TYPE_H
#define HOLDFAST_BOARD_TYPE_H

#include <Python.h>
#include <structmember.h>

#include "arguments.h"
#include "board/run_op.h"
#include "kernels/reductions.h"

extern PyType_Spec board_spec;

#endif
