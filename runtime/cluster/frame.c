#include "frame.h"

#include <linux/if_ether.h>
#include <linux/virtio_net.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>

enum { VIRTIO = sizeof(struct virtio_net_hdr), ETHERNET = ETH_HLEN, IPV4_MIN = 20, TCP_MIN = 20 };

static const unsigned char *ethernet(const struct frame *frame)
{
    return frame->data + VIRTIO;
}

static int is_ipv4(const struct frame *frame)
{
    const unsigned char *header = ethernet(frame);
    return frame->num_bytes >= VIRTIO + ETHERNET + IPV4_MIN && header[12] == 0x08 && header[13] == 0x00;
}

/*
 * The kernel hands over up to 64 KiB of a TCP stream as one frame with one header (GSO) and leaves the cutting to
 * the device. On a real wire each segment would carry its own header, so that is what is counted.
 */
static int64_t frame_wire_bytes(const struct frame *frame)
{
    int64_t length = (int64_t)(frame->num_bytes - VIRTIO);
    struct virtio_net_hdr virtio;
    memcpy(&virtio, frame->data, sizeof virtio);
    if (virtio.gso_type == VIRTIO_NET_HDR_GSO_NONE || virtio.gso_size == 0 || !is_ipv4(frame))
        return length;
    size_t tcp = ETHERNET + (size_t)(ethernet(frame)[ETHERNET] & 15) * 4;
    if (VIRTIO + tcp + TCP_MIN > frame->num_bytes)
        return length;
    int64_t header = (int64_t)(tcp + (size_t)(ethernet(frame)[tcp + 12] >> 4) * 4);
    int64_t payload = length - header;
    if (payload <= 0)
        return length;
    int64_t segments = (payload + virtio.gso_size - 1) / virtio.gso_size;
    return payload + segments * header;
}

struct frame *frame_new(const unsigned char *data, size_t num_bytes, int src)
{
    if (num_bytes < VIRTIO + ETHERNET)
        return NULL;
    struct frame *frame = malloc(sizeof *frame + num_bytes);
    if (frame == NULL)
        return NULL;
    *frame = (struct frame){.src = src, .dst = -1, .num_bytes = num_bytes};
    memcpy(frame->data, data, num_bytes);
    frame->wire_bytes = frame_wire_bytes(frame);
    return frame;
}

int frame_destination(const struct frame *frame)
{
    static const unsigned char prefix[4] = {0x02, 0, 0, 0};
    const unsigned char *address = ethernet(frame);
    if (memcmp(address, prefix, sizeof prefix) != 0)
        return -1; /* broadcast or multicast: neighbours are static, nothing needs it */
    return address[4] * 256 + address[5] - 1;
}

unsigned frame_flow(const struct frame *frame)
{
    if (!is_ipv4(frame))
        return 0;
    const unsigned char *ip = ethernet(frame) + ETHERNET;
    size_t ports = ETHERNET + (size_t)(ip[0] & 15) * 4;
    if ((ip[9] != IPPROTO_TCP && ip[9] != IPPROTO_UDP) || VIRTIO + ports + 4 > frame->num_bytes)
        return 0;
    unsigned hash = 2166136261u; /* FNV-1a */
    for (size_t i = 12; i < 20; i++)
        hash = (hash ^ ip[i]) * 16777619u;
    for (size_t i = 0; i < 4; i++)
        hash = (hash ^ ethernet(frame)[ports + i]) * 16777619u;
    hash ^= hash >> 16;
    return hash % NUM_FLOWS;
}
