#define PY_SSIZE_T_CLEAN
#include "board/board_object.h"

int wait_for(Board *self, int rank, int flag, uint64_t value) {
    board *b = &self->b;
    int missing = spin_wait(b, rank, flag, value, 0, 0);
    if (missing >= 0 && b->spins + b->yields > 0) {
        Py_BEGIN_ALLOW_THREADS;
        missing = spin_wait(b, rank, flag, value, b->spins, b->yields);
        if (missing >= 0)
            missing = sleep_wait(b, rank, flag, value);
        Py_END_ALLOW_THREADS;
    }
    return missing;
}
