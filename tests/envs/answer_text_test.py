"""Which texts Python and SymPy may compute. No text is computed here, because some never end."""

from absl.testing import absltest
from absl.testing import parameterized

from stppo_jax.envs.adapters import answer_text


class CodeTest(parameterized.TestCase):

  @parameterized.parameters(
      ("f('a')", True),
      ('f(1)', True),
      ('(f #sin\n(1))', True),
      ('["{f(1)}"[0]]', True),
      ('x.y', True),
      ('[x][0](1)', True),
      ("['A', 'B']", False),
      ('{"a": [true, null, "f(1)"]}', False),
      ('{"a": [true, null, f(1)]}', True),
      ('[[0, 1], [1, 0]]', False),
      ('_ _ Q _\n_ Q _ _', False),
      ('3*x**2*sin(x + 1)/2 + log(x) + C', False),
      ('(50 - 2) * 4', False),
      ('ABCDEABCDE', False),
  )
  def test_answer_calls_no_function_of_python(self, answer, is_refused):
    self.assertEqual(answer_text.may_run_code(answer), is_refused)


class SizeTest(parameterized.TestCase):

  @parameterized.parameters(
      # powers
      '9**9**9', '(9**9)**9**9', '-9**-9**-9', '9**(9**9)', '9.5**9**9', '10.0**10**10',
      '(1/3)**9**9', '(1+1)**99999', '9 ** (\n9 ** 9)', '9**(5*9**9/2)', '9**(9*x/x)**9',
      '[9**9**9]', '24 if 9**9**9 else 1', '1 < 9**9**9', '(1!=2)*9**9**9', '9**9**(9 if x else 8)',
      'True**9**9', '0x99**0x9999', '1_0**1_0**1_0', '9**True**9**9', '(9, 9)[0]**9**9',
      # large exponents of a name, which SymPy's gcd replaces by a number
      'x**9999', 'x**(1/9999)', 'x**0.123456789', '(x**99)**99', 'x**1e9',
      # other operators
      '9^9^9', '9**(1^999999999)', '1<<9**9', '1<<99999', '(1<<4000)<<4000', '1<<-~99999',
      # factorials
      '99999!', '(3!)!', '(9)!', '9 !', '3!!', 'x! + 9**9**9', 'x !+9**9**9', 'x!**1000//2',
      # floats, which SymPy and Fraction read as exact numbers
      '1e999999999', '1e-999999999', '1E+999999999', '1.e9_9_9', '5e1000', '1e٩٩٩٩٩٩', '1e9,999999',
      '[1e99999]', '2**1e9',
      # repeated sequences
      '[0]*10**9', '10**9*[0]', '[0]*9**9*9', '[[[0]*999]*999]*999', '(0,)*999999999',
      '[0, 0, 0, 0]*999999', '{1}*10**9', '([0] or 1)*10**9', 'answer*10**9', 'answer % 9999',
      '-[0]*10**9',
      # functions
      'exp(exp(exp(9)))', 'cosh(99999)', 'sin(I*10**9)', 'erf(99*I)',
      'Integer(9)**Integer(9)**Integer(9)', 'sqrt(9)**9**9',
      'Rational(1, 9**9)**9**9', 'factorial(99999)', 'log(x, 9**9**9)', '9**(log(I)**4000)',
      # what SymPy reads otherwise than Python
      '9* *9* *9', '9*\t*9* *9', 'x²+9**9**9', '٣+9**9**9', 'lambda 5: 9**9**9', '0.[9]**9**9',
      # names that get a value
      '(a:=9)**a**a', '[0 for x in y]', '(lambda: 9)', '[*x, 9**9**9]', '{1: 9**9**9}',
  )  # fmt: skip
  def test_endless_arithmetic_is_large(self, answer):
    self.assertTrue(answer_text.may_be_large(answer))

  @parameterized.parameters(
      '2**10', '(8-4)*6', '1e3', '3*(4+5)**2', '10^6', '10**6', '-7', '1/3', '3.14159', '2**-2',
      '2**0.5', '1_000', '1,234', '1<<8', '0x1F', '0x4e7400', '50 - 2 * 4', '9 * (-9)', '9**9',
      '12345678901234567890',
      'word', 'two words', 'Hello!', 'Well done!', 'ABCDE', 'I do not know', 'x is y',
      'Ünïcode', '×', '',
      '_ _ Q _\n_ Q _ _', '1 2 3\n4 5 6', '24 = 4', '50%', '3x²', '(' * 5000, '[' * 5000,
      '[1, 2, 3]', '["A", "B!"]', '{"a": [1, 2.5, "x"], "b": null}', '[[0, 1], [1, 0]]',
      '[0]*9', '[1] + [2]',
      '["9**9**9", "5!"]', '{"a": [true, null, "f(1) \\" 5!"]}', '+'.join(['9*x**2'] * 1500),
      '3*x**2*sin(x + 1)/2 + log(x) + C', 'exp(-50*x)/50 + C', 'x**(3/2)*2/3',
      'sin(9*x + 7)*cos(50*x)', 'erf(sqrt(2)*x/2)', 'x**100 + y**100',
      '-63*x**7*y**2 + 1000000*x - 9', 'E**(2*x)', 'sqrt(10**6)', 'x**y', '2**(3*x)',
      'pi*x**10', 'x!',
      'X**12/12 + 7*X**11/11 - X**10 + X**9/9 + 2*X**8 - X**7/7 + X**6/6 + X**5/5 + X**4/4 + C',
  )  # fmt: skip
  def test_ordinary_answer_is_not_large(self, answer):
    self.assertFalse(answer_text.may_be_large(answer))

  def test_long_text_needs_no_long_time(self):
    for answer in ('(9**9)*' * 5000 + '9', '9**' * 3000 + '9', '-' * 9999 + '9'):
      self.assertTrue(answer_text.may_be_large(answer))
    self.assertFalse(answer_text.may_be_large('+'.join(['9**9'] * 200)))
    self.assertFalse(answer_text.may_be_large('no; ' * 9999))
    for answer in ('9' * 99999, 'e' * 99999, '1_' * 99999, ' ' * 99999, '.. ' * 9999):
      self.assertFalse(answer_text.may_run_code(answer))


if __name__ == '__main__':
  absltest.main()
