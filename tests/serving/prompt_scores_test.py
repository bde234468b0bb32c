"""Log-probs of prompts and likeliest tokens, as evaluation harnesses ask for them."""

from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax
import numpy as np
import pytest

from stppo_jax.serving import sessions
from tests.serving import gateway_test

pytestmark = pytest.mark.guests(
    what='Log-probs of prompts as evaluation harnesses ask for them',
    version='documentation of the interface',
    date='2026-11-26',
    touches='serving/prompt_scores.py',
)

QUESTION = gateway_test.QUESTION
PATH = '/v1/completions'


class PromptScoresTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.server = cls.enterClassContext(gateway_test.running())
    cls.ids = cls.server.app.service.tokenizer.encode(QUESTION)
    asked = {'prompt': QUESTION, 'max_tokens': 8, 'temperature': 0, 'logprobs': 0}
    cls.sampled = cls.ask(**asked, return_token_ids=True)[0]

  @classmethod
  def ask(cls, **fields):
    answer = gateway_test.post(cls.server, fields, PATH)
    assert answer.ok, answer.text
    return answer.json()['choices']

  def test_scores_of_sampled_turn_equal_sampling(self):
    """The request of lm-eval's multiple choice: the greedy turn as a part of the prompt."""
    turn = self.sampled['token_ids']
    other = [turn[0], turn[0]]  # nobody would write it
    asked = {'max_tokens': 1, 'temperature': 0, 'logprobs': 1, 'seed': 1, 'echo': True}
    choices = self.ask(prompt=[self.ids + turn, self.ids + other], **asked)
    scores, others = [choice['logprobs'] for choice in choices]
    size = len(self.ids)
    np.testing.assert_allclose(
        scores['token_logprobs'][size:-1], self.sampled['logprobs']['token_logprobs'], atol=1e-4
    )
    is_greedy = [
        [
            value == max(top.values())
            for value, top in zip(found['token_logprobs'][1:], found['top_logprobs'][1:])
        ]
        for found in (scores, others)
    ]
    self.assertTrue(all(is_greedy[0][size - 1 :]))
    self.assertEqual(is_greedy[1][size - 1 : size + 1], [True, False])
    self.assertIsNone(scores['token_logprobs'][0])
    self.assertIsNone(scores['top_logprobs'][0])

  def test_offsets_of_characters_that_tokens_split(self):
    asked = {'echo': True, 'logprobs': 1, 'max_tokens': 2, 'temperature': 0}
    (choice,) = self.ask(prompt='法国 café 😀?', **asked)
    text, found = choice['text'], choice['logprobs']
    self.assertIn('\ufffd', ''.join(found['tokens']))  # a token that is a part of a character
    for start, token in zip(found['text_offset'], found['tokens']):
      self.assertLessEqual(start, len(text))
      if '\ufffd' not in token:
        self.assertStartsWith(text[start:], token)

  @parameterized.parameters(0, 2)
  def test_echoed_text_is_that_of_the_tokens(self, max_tokens):
    asked = {'echo': True, 'logprobs': 5, 'max_tokens': max_tokens, 'temperature': 0}
    (choice,) = self.ask(prompt=QUESTION, **asked)
    found = choice['logprobs']
    self.assertStartsWith(choice['text'], QUESTION)
    self.assertEqual(''.join(found['tokens']), choice['text'])
    for start, token in zip(found['text_offset'], found['tokens']):
      self.assertStartsWith(choice['text'][start:], token)
    sizes = {name: len(values) for name, values in found.items()}
    self.assertEqual(set(sizes.values()), {len(self.ids) + max_tokens})
    for token, value, top in list(
        zip(found['tokens'], found['token_logprobs'], found['top_logprobs'])
    )[1:]:
      self.assertLessEqual(value, max(top.values()))
      self.assertIn(token, top)
      self.assertBetween(len(top), 5, 6)

  def test_chat_gives_likeliest_tokens(self):
    fields = gateway_test.ASKED | {'temperature': 0, 'logprobs': True, 'max_tokens': 4}
    content = [
        gateway_test.post(self.server, fields | {'top_logprobs': top}).json()['choices'][0][
            'logprobs'
        ]['content']
        for top in (0, 2)
    ]
    for plain, entry in zip(*content):
      first, second = entry['top_logprobs']
      self.assertEqual(first['token'], plain['token'])
      self.assertEqual(first['logprob'], entry['logprob'])
      self.assertAlmostEqual(first['logprob'], plain['logprob'], places=4)
      self.assertLess(second['logprob'], first['logprob'])

  @parameterized.parameters(
      ({'max_tokens': 0}, 'needs echo=true'),
      ({'echo': True, 'stream': True}, 'stream'),
      ({'logprobs': 2, 'stream': True}, 'stream'),
      ({'logprobs': 6}, 'less than or equal to 5'),
  )
  def test_other_requests_are_errors(self, fields, message):
    answer = gateway_test.post(self.server, {'prompt': QUESTION} | fields, PATH)
    self.assertEqual(answer.status_code, 400)
    self.assertIn(message, answer.json()['error']['message'])

  def test_device_without_memory_refuses_scores_and_serves_on(self):
    def fail(*unused):
      raise jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: out of memory\nmore of it')

    asked = {'prompt': QUESTION, 'echo': True, 'logprobs': 0, 'max_tokens': 1, 'temperature': 0}
    before = self.ask(**asked)
    scorer = self.server.app.service.scheduler._scorer
    with mock.patch.object(scorer, '_score_rows', fail):
      answer = gateway_test.post(self.server, asked, PATH)
    self.assertEqual(answer.status_code, 400)
    message = answer.json()['error']['message']
    self.assertRegex(message, rf'prompts of {len(self.ids) + 1} tokens.*EXHAUSTED: out of memory')
    self.assertNotIn('\n', message)
    self.assertEqual(self.ask(**asked), before)

  def test_session_refuses_echo(self):
    service = self.server.app.service
    session = service.open_session(jax.random.key(0), sessions.Sampling())
    path = f'/s/{session.name}/v1/completions'
    for fields in ({'echo': True}, {'logprobs': 2}):
      answer = gateway_test.post(self.server, {'prompt': QUESTION} | fields, path)
      self.assertEqual((answer.status_code, 'session' in answer.text), (400, True))
    path = path.replace('completions', 'chat/completions')
    asked = gateway_test.ASKED | {'logprobs': True, 'top_logprobs': 1}
    answer = gateway_test.post(self.server, asked, path)
    self.assertEqual((answer.status_code, 'at most 0 in a session' in answer.text), (400, True))

  def test_cut_distribution_has_no_likeliest_tokens(self):
    with gateway_test.running(logprobs_mode='processed_logprobs') as server:
      asked = {'prompt': QUESTION, 'logprobs': 2, 'top_p': 0.5}
      answer = gateway_test.post(server, asked, PATH)
    self.assertEqual((answer.status_code, 'raw_logprobs' in answer.text), (400, True))


if __name__ == '__main__':
  absltest.main()
