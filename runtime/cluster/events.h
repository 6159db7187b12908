/* What is to happen when: a binary heap by time, then by order of pushing. */
#ifndef TWINBED_EVENTS_H
#define TWINBED_EVENTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct frame;
struct link;

enum event_kind {
    LINK_SENT,     /* the link has put out the last bit of the frame that it was sending */
    FRAME_ARRIVED, /* that bit has reached the link's far end */
};

struct event {
    int64_t at_ns;
    uint64_t order; /* set by events_push: ties are served first come, first served */
    enum event_kind kind;
    struct link *link;
    struct frame *frame; /* FRAME_ARRIVED only */
};

struct events {
    struct event *heap;
    size_t count, capacity;
    uint64_t pushed;
};

void events_push(struct events *events, struct event event); /* ends the program when memory is out */
bool events_due(const struct events *events, int64_t now_ns);
struct event events_pop(struct events *events); /* the earliest; there must be one */

#endif
