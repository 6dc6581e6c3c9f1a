/* Replays what the NumPy kernels did and compares: the proof of equal bits on an architecture that
 * has no Python at hand. Input (argv[1], little-endian): records of
 *   u32 operation, u32 instruction set, i64 n[6], float f[2], then buffers of u64 length + bytes;
 * three in (the first two may be written to), three expected out. Exits with 1 and says where at the
 * first difference. Buffers are allocated exactly, so that a sanitizer sees a stray access.
 */
#include <stdio.h>
#include <stdlib.h>

#include "kernels.c"

typedef struct { u8 *data; u64 size; } buffer;

static FILE *input;

static int get(void *to, size_t size) { return fread(to, 1, size, input) == size; }

static buffer get_buffer(void)
{
    buffer b = {NULL, 0};
    if (!get(&b.size, 8)) { fprintf(stderr, "short file\n"); exit(2); }
    b.data = malloc(b.size ? b.size : 1);
    if (b.size && !get(b.data, b.size)) { fprintf(stderr, "short file\n"); exit(2); }
    return b;
}

static buffer room(i64 size)
{
    buffer b = {calloc((size_t)(size > 0 ? size : 1), 1), (u64)size};
    return b;
}

static int differs(const char *what, long record, const void *got, i64 size, buffer expected)
{
    if (size == (i64)expected.size && !memcmp(got, expected.data, expected.size)) return 0;
    printf("record %ld: %s differs (%ld bytes, expected %ld)\n", record, what, (long)size,
           (long)expected.size);
    return 1;
}

int main(int argc, char **argv)
{
    u32 head[2];
    long record = 0;
    int bad = 0;
    if (argc != 2 || !(input = fopen(argv[1], "rb"))) return 2;
    for (; !bad && get(head, 8); record++) {
        i64 n[6], result = 0, hits = 0;
        float f[2];
        if (!get(n, sizeof n) || !get(f, sizeof f)) return 2;
        buffer in[3], want[3], out[3] = {{NULL, 0}, {NULL, 0}, {NULL, 0}};
        for (int i = 0; i < 3; i++) in[i] = get_buffer();
        for (int i = 0; i < 3; i++) want[i] = get_buffer();
        float *r = (float *)in[0].data, *g = in[1].size ? (float *)in[1].data : NULL;
        kernels_use((int)head[1]);
        switch (head[0]) {
        case 0: /* n: count, bound, zero */
            out[0] = room(4 * (n[0] + 16));
            out[1] = room(4 * (n[0] + 16));
            result = select_large(r, g, n[0], (u32)n[1], (u32 *)out[0].data, (float *)out[1].data,
                                  n[0] + 16, (int)n[2], &hits);
            bad = differs("positions", record, out[0].data, 4 * result, want[0])
                | differs("values", record, out[1].data, 4 * result, want[1])
                | differs("residual", record, r, 4 * n[0], want[2]);
            break;
        case 1: /* n: count, rank, stride, seed */
            out[0] = room(4 * (n[0] / n[2] + CHUNK));
            result = threshold(r, g, n[0], n[1], n[2], (u32)n[3], (u32 *)out[0].data, &hits);
            bad = differs("threshold", record, &result, 8, want[0])
                | differs("hits", record, &hits, 8, want[1]);
            break;
        case 2: /* in[0]: positions; in[1]: values; in[2]: residual. n: count, elements, bits */
            out[0] = room(10 * n[0] + 128);
            out[1] = room(5 * n[0] + 64);
            result = sparse_encode((float *)in[2].data, (u32 *)in[0].data, (float *)in[1].data, n[0],
                                   n[1], (int)n[2], out[0].data, out[1].data);
            bad = differs("payload", record, out[0].data, result, want[0])
                | differs("residual", record, in[2].data, (i64)in[2].size, want[1]);
            break;
        case 3: /* in[0]: payload. n: elements, bits, announced count, valid */
            out[0] = room(4 * n[2]);
            out[1] = room(4 * n[2]);
            result = sparse_head(in[0].data, (i64)in[0].size, n[0], &hits);
            if (result >= 0) {
                if (result > n[2]) { printf("record %ld: count\n", record); return 1; }
                result = sparse_decode(in[0].data + hits, (i64)in[0].size - hits, result, n[0],
                                       (int)n[1], f[0], (u32 *)out[0].data, (float *)out[1].data);
            }
            if ((result >= 0) != n[3]) { printf("record %ld: verdict\n", record); return 1; }
            if (n[3])
                bad = differs("positions", record, out[0].data, 4 * result, want[0])
                    | differs("values", record, out[1].data, 4 * result, want[1]);
            break;
        case 4: /* n: count, levels, width, stochastic, noise, scale bytes */
            out[0] = room((i64)want[0].size);
            blocks_encode(r, g, n[0], (int)n[1], (int)n[2], (int)n[3], (u32)n[4], out[0].data,
                          out[0].data + n[5]);
            bad = differs("payload", record, out[0].data, (i64)want[0].size, want[0])
                | differs("residual", record, r, 4 * n[0], want[1]);
            break;
        case 5: /* in[0]: sum; in[2]: payload. n: count, levels, width, valid, add, scale bytes */
            result = blocks_check(in[2].data, in[2].data + n[5], n[0], (int)n[1], (int)n[2]);
            if ((result >= 0) != n[3]) { printf("record %ld: verdict\n", record); return 1; }
            if (n[3]) {
                blocks_decode(in[2].data, in[2].data + n[5], n[0], (int)n[2], (int)n[4], f[0], r);
                bad = differs("sum", record, r, 4 * n[0], want[0]);
            }
            break;
        case 6: /* n: count, scale bytes */
            out[0] = room((i64)want[0].size);
            if (g) signs_drain(r, g, n[0], out[0].data, out[0].data + n[1]);
            else signs_encode(r, n[0], out[0].data, out[0].data + n[1]);
            bad = differs("payload", record, out[0].data, (i64)want[0].size, want[0])
                | differs("residual", record, r, 4 * n[0], want[1]);
            break;
        case 7: /* in[0]: sum; in[2]: payload. n: count, scale bytes, add */
            if (signs_check(in[2].data, in[2].data + n[1], n[0])) return 1;
            signs_decode(in[2].data, in[2].data + n[1], n[0], (int)n[2], f[0], r);
            bad = differs("sum", record, r, 4 * n[0], want[0]);
            break;
        case 8: /* n: count */
            momentum(r, g, n[0], f[0], f[1]);
            bad = differs("momentum", record, r, 4 * n[0], want[0]);
            break;
        case 9: /* n: count, bits */
            out[0] = room((i64)want[0].size);
            out[1] = room(4 * n[0]);
            if (g) planes_drain(r, g, n[0], (int)n[1], out[0].data);
            else levels_encode(r, n[0], 0.0f, (int)n[1], out[0].data, (float *)out[1].data);
            bad = differs("payload", record, out[0].data, (i64)want[0].size, want[0])
                | differs("residual", record, r, 4 * n[0], want[1]);
            break;
        case 10: /* in[2]: sum. n: count, brain */
            out[0] = room(2 * n[0]);
            halves_encode(r, g, n[0], (int)n[1], out[0].data);
            halves_decode(out[0].data, n[0], (int)n[1], 1, f[0], (float *)in[2].data);
            bad = differs("payload", record, out[0].data, 2 * n[0], want[0])
                | differs("residual", record, r, 4 * n[0], want[1])
                | differs("sum", record, in[2].data, 4 * n[0], want[2]);
            break;
        case 11: { /* in[0]: payload. n: count, elements, where the positions begin, their bytes */
            gaps state;
            out[0] = room(4 * n[0]);
            result = gaps_begin(&state, in[0].data + n[2], (i64)in[0].size - n[2], n[0], n[1]);
            for (i64 at = 0; result >= 0 && at < n[0]; at += result)
                result = gaps_next(&state, 96, (u32 *)out[0].data + at);
            bad = result < 0 || gaps_end(&state) != n[3]
                || differs("positions", record, out[0].data, 4 * n[0], want[0]);
            break;
        }
        case 12: /* in[0]: planes. n: count, bits */
            out[0] = room(4 * n[0]);
            for (i64 at = 0; at < n[0]; at++) ((float *)out[0].data)[at] = 1.0f;
            bad = levels_check(in[0].data, (i64)in[0].size, n[0], (int)n[1]) != (i64)in[0].size;
            for (i64 at = 0; at < n[0]; at += 256)
                levels_read(in[0].data, n[0], at, at + 256 < n[0] ? at + 256 : n[0], (int)n[1], 1,
                            f[0], (float *)out[0].data + at);
            bad |= differs("values", record, out[0].data, 4 * n[0], want[0]);
            break;
        default:
            return 2;
        }
        for (int i = 0; i < 3; i++) { free(in[i].data); free(want[i].data); free(out[i].data); }
    }
    if (!bad) printf("%ld records equal, instruction sets up to %d\n", record, kernels_best());
    return bad;
}
