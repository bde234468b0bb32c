"""The roofline of sampling, by hand."""

from absl.testing import absltest

from stppo_jax.planning import roofline
from stppo_jax.planning import topologies

CHIP = topologies.Chip('chip', 0, flops=1000.0, bandwidth=100.0, link=10.0, latency=0.5)


class RooflineTest(absltest.TestCase):

  def test_reads_and_sums_add_up(self):
    """(300 + 20 * 5) / 100 = 4 s of reads, 2 * 15 / 10 = 3 s of links, 4 * 0.5 = 2 s of waiting."""
    token = roofline.Token(weights=300, cache=5, flops=100.0, sent=15, collectives=4)
    self.assertEqual(token.seconds(20, CHIP), 4 + 3 + 2)

  def test_longer_compute_bounds_the_time(self):
    token = roofline.Token(weights=300, cache=5, flops=7000.0)
    self.assertEqual(token.seconds(20, CHIP), 7)

  def test_one_device_sends_nothing(self):
    token = roofline.Token(weights=300, cache=0)
    self.assertEqual(token.seconds(20, topologies.Chip('chip', 0, 1.0, 100.0)), 3)

  def test_steps_read_the_bucket_that_holds_the_rows(self):
    """Rows of 2, 4, 6 and 8 tokens in buckets of 4 and 8: two steps of each."""
    token = roofline.Token(weights=100, cache=100)
    seconds = roofline.decode_seconds(token, 4, 0, 8, (4, 8), CHIP)
    self.assertEqual(seconds, 2 * (1 + 4) + 2 * (1 + 8))

  def test_tokens_per_second(self):
    rollout = roofline.Rollout(decode=8.0, other=2.0, tokens=500)
    self.assertEqual((rollout.seconds, rollout.tokens_per_second), (10.0, 50.0))


if __name__ == '__main__':
  absltest.main()
