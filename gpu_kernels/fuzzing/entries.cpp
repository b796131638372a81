/* Mutated entries through every function of entries.h, under a sanitizer, in exact allocations.
 *
 * Whatever the rows say, nothing outside of them and of the arrays may be touched. Rows that are
 * found to end where they are said to end must be read by the other functions as well.
 *
 *   entries ROWS CONTENTS COUNT ROUNDS SEED
 *
 * ROWS and CONTENTS: files with COUNT plain rows, and as many contents, all of one length.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <fstream>
#include <iterator>
#include <memory>
#include <vector>

extern "C" {
#include "../entries/entries.h"
}

static uint64_t random_state;

static uint64_t draw(uint64_t below) { /* splitmix64 */
    uint64_t z = random_state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return (z ^ z >> 31) % below;
}

/* An allocation of exactly this size, so that the sanitizer sees one element too far. */
template <typename T> static std::unique_ptr<T[]> exact(size_t count) {
    return std::unique_ptr<T[]>(new T[count]());
}

static uint64_t used_rows, filled_rows;

static std::vector<uint8_t> read_file(const char *path) {
    std::ifstream file(path, std::ios::binary);
    return std::vector<uint8_t>((std::istreambuf_iterator<char>(file)), {});
}

static void flip(std::vector<uint8_t> &made) {
    made[draw(made.size())] ^= (uint8_t)(1 << draw(8));
}

static void use(const std::vector<uint8_t> &made, const std::vector<uint8_t> &contents,
                uint64_t count, uint64_t content_count) {
    const uint64_t chunks = draw(4), room = 2 + draw(8), names_room = draw(40);
    auto rows = exact<uint8_t>(made.size());
    memcpy(rows.get(), made.data(), made.size());
    auto ends = exact<uint64_t>(count + 1);
    count = torpor_entry_ends(rows.get(), made.size(), ends.get() + 1, count);
    used_rows += count;

    auto plain = exact<uint32_t>(chunks);
    for (uint64_t i = 0; i < chunks; i++)
        plain[i] = (uint32_t)(50 << i);
    uint8_t linked = 0;
    torpor_check_entries(rows.get(), ends.get(), count, plain.get(), chunks, 2, &linked);

    auto used = exact<uint8_t>(chunks), kinds = exact<uint8_t>(count), marks = exact<uint8_t>(count);
    torpor_totals totals;
    torpor_count_entries(rows.get(), ends.get(), count, used.get(), chunks, &totals);
    auto roots = exact<uint32_t>(count);
    auto sizes = exact<int64_t>(count), whole = exact<int64_t>(count), at = exact<int64_t>(count);
    torpor_describe_entries(rows.get(), ends.get(), count, kinds.get(), roots.get(), sizes.get(),
                            whole.get());

    auto places = exact<torpor_place>(room);
    auto names = exact<uint8_t>(names_room);
    for (uint64_t row = 0, after, listed; row < count; row = after) {
        after = torpor_group_entries(rows.get(), ends.get(), row, count, places.get(), room,
                                     &listed, names.get(), names_room, draw(4) ? marks.get() : nullptr);
        if (after == TORPOR_NOT_PLAIN || after == row)
            break;
    }

    auto content = exact<uint8_t>(contents.size());
    memcpy(content.get(), contents.data(), contents.size());
    auto content_ends = exact<uint64_t>(content_count + 1);
    for (uint64_t i = 0; i <= content_count; i++)
        content_ends[i] = i * (contents.size() / content_count);
    const uint64_t beyond = draw(100) ? 0 : 1;
    for (uint64_t i = 0; i < count; i++)
        at[i] = draw(4) ? (int64_t)draw(content_count + beyond) : -1;
    const uint64_t most = draw(8) ? made.size() + 2 * contents.size() : draw(made.size() + 1);
    auto filled = exact<uint8_t>(most);
    auto filled_ends = exact<uint64_t>(count);
    if (torpor_fill_entries(rows.get(), ends.get(), count, content.get(), content_ends.get(),
                            content_count, at.get(), filled.get(), most,
                            filled_ends.get()) != TORPOR_NOT_PLAIN)
        filled_rows += count;
}

int main(int argc, char **argv) {
    if (argc != 6)
        return 2;
    const std::vector<uint8_t> plain = read_file(argv[1]), plain_contents = read_file(argv[2]);
    const uint64_t count = strtoull(argv[3], nullptr, 10), rounds = strtoull(argv[4], nullptr, 10);
    random_state = strtoull(argv[5], nullptr, 10);
    for (uint64_t round = 0; round < rounds; round++) {
        std::vector<uint8_t> made(plain), contents(plain_contents);
        if (draw(4) == 0)
            flip(contents);
        for (uint64_t change = draw(4); change > 0 && !made.empty(); change--)
            switch (draw(4)) {
            case 0: flip(made); break;
            case 1: made[draw(made.size())] = (uint8_t)draw(256); break;
            case 2: made.resize(draw(made.size() + 1)); break;
            case 3: made.insert(made.begin() + (long)draw(made.size()), (uint8_t)draw(256)); break;
            }
        use(made, contents, draw(8) ? count : draw(2 * count), count);
    }
    printf("{\"rounds\": %llu, \"rows\": %llu, \"filled\": %llu}\n", (unsigned long long)rounds,
           (unsigned long long)used_rows, (unsigned long long)filled_rows);
    return 0;
}
