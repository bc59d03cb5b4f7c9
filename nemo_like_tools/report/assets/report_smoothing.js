// Smooths curves.

// Returns the exponential moving average of [step, value] pairs. weight, from 0 to below 1, is that of what was
// before; the zero with which the average begins is divided out, so the first value stays as it is.
function smoothed(points, weight) {
  let sum = 0, share = 0;
  return points.map(([step, value]) => {
    sum = weight * sum + (1 - weight) * value;
    share = weight * share + (1 - weight);
    return [step, sum / share];
  });
}

function nearest(points, step) {
  const nearer = (best, point) => (Math.abs(point[0] - step) < Math.abs(best[0] - step) ? point : best);
  return points.reduce(nearer);
}
