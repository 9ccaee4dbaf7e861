// Remembers the list a reader came from, so that next and previous follow it instead of the file.
import { link } from "board/router.js";

let trail = null; // {run, href, places: [{shard, row}], matched, offset}

/** The list page leaves what it shows. */
export function leaveTrail(run, href, rows, offset, matched) {
  trail = { run, href, offset, matched, places: rows.map((row) => ({ shard: row.shard, row: row.row })) };
}

/** Where a trajectory stands in that list: {href, position, matched, previous, next}; null when it is not in it. */
export function onTrail(run, shard, row) {
  if (trail === null || trail.run !== run) return null;
  const index = trail.places.findIndex((place) => place.shard === shard && place.row === row);
  if (index < 0) return null;
  return {
    href: trail.href,
    position: trail.offset + index + 1,
    matched: trail.matched,
    previous: trail.places[index - 1] ?? null,
    next: trail.places[index + 1] ?? null,
  };
}

/** The way back to the list, as the reader left it. */
export function backToList(run) {
  return trail !== null && trail.run === run ? trail.href : link(`/run/${run}/trajectories`);
}
