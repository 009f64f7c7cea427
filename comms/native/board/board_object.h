/* What a `Board` of Python holds, and its waits. */

#ifndef HOLDFAST_BOARD_OBJECT_H
#define HOLDFAST_BOARD_OBJECT_H

#include <Python.h>

#include "arguments.h"
#include "board/pipeline.h"
#include "board/publication.h"

/* What keeps an op from its end: see run_op.h. */
typedef struct {
    int why, rank;
    uint64_t value, flag;
} halted;

typedef struct {
    PyObject_HEAD Py_buffer memory;
    board b;
    pipeline p;
    halted halted;
    uint64_t number;              /* the newest op that is complete */
    uint64_t begun;               /* the newest op that was published */
    const char *from;             /* address of its first input */
    uint64_t signature;           /* what it was published as, without `roots` */
    int copied;                   /* whether its inputs were copied into the slot */
    uint64_t roots, roots_before; /* of all ops so far; of those before the newest one: see `with_roots` */
} Board;

/* `spin_wait`, then `sleep_wait`; without the GIL unless the first check succeeds. */
int wait_for(Board *self, int rank, int flag, uint64_t value);

#endif
