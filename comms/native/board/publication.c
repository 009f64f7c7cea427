#define PY_SSIZE_T_CLEAN
#include "board/publication.h"

int publish(board *b, uint64_t op, uint64_t signature, const span *inputs, int count) {
    uint64_t *table = table_of(b, b->rank, op), total = 0;
    table[0] = signature;
    for (int i = 0; i < count; i++)
        total += table[2 + 2 * i] = inputs[i].nbytes;
    int fits = total <= b->slot;
    if (is_tiny(inputs, count)) {
        uint64_t *line = (uint64_t *)line_at(b, b->rank, op);
        line[LINE_SIGNATURE] = signature, line[LINE_NBYTES] = total;
        if (count)
            memcpy(line + LINE_INPUT, inputs->at, total);
        atomic_store_explicit(line_at(b, b->rank, op), op, memory_order_release);
    } else {
        char *slot = slot_of(b, b->rank, op);
        int near = 1;
        if (fits && total >= STREAMED)
            probe_write(b), near = all_near(b);
        for (int i = 0; i < count; i++) {
            table[1 + 2 * i] = fits ? (uint64_t)(slot - b->base) | INLINED : 0;
            if (fits) {
                if (near || inputs[i].nbytes < STREAMED)
                    copy_bytes(slot, inputs[i].at, inputs[i].nbytes);
                else
                    stream(slot, inputs[i].at, inputs[i].nbytes);
                slot += inputs[i].nbytes;
            }
        }
    }
    raise_flag(b, FLAG, 4 * op + 1);
    return fits;
}

int collect(board *b, uint64_t op, uint64_t index, const span *into) {
    uint64_t nbytes;
    int all = 1;
    for (int rank = 0; rank < b->size; rank++)
        all &= input(b, rank, op, 0, &nbytes) != NULL;
    for (int rank = 0; rank < b->size && into; rank++)
        if (rank != b->rank && (input(b, rank, op, index, &nbytes), nbytes != into[rank].nbytes))
            return rank;
    if (!all)
        return NOT_COPIED;
    for (int i = 1; i < b->size && into; i++) {
        int rank = (b->rank + i) % b->size;
        const char *at = input(b, rank, op, index, &nbytes);
        if (at) {
            probe_large_input(b, rank, nbytes);
            copy_bytes(into[rank].at, at, nbytes);
        }
    }
    publish_locality(b);
    return TAKEN_ALL;
}

int reduce_inputs(board *b, uint64_t op, uint64_t index, long kind, span into) {
    uint64_t nbytes;
    for (int rank = 0; rank < b->size; rank++)
        if (!input(b, rank, op, index, &nbytes) || nbytes != into.nbytes)
            return rank;
    const char *first = input(b, 0, op, index, &nbytes);
    for (int rank = 1; rank < b->size; rank++) {
        const char *theirs = input(b, rank, op, index, &nbytes);
        probe_large_input(b, rank == b->rank ? 0 : rank, nbytes);
        kernel_of(kind)(into.at, rank == 1 ? first : into.at, theirs, nbytes / itemsize_of(kind));
    }
    publish_locality(b);
    return TAKEN_ALL;
}
