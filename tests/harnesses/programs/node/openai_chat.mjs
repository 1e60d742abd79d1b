// The tool runner of OpenAI's SDK, streamed.
import OpenAI from 'openai';
import { MODEL, PARAMETERS, PROMPT, bash } from './shell.mjs';

const fn = { name: 'bash', description: 'Run a command.', parameters: PARAMETERS, parse: JSON.parse, function: bash };
const runner = new OpenAI().chat.completions.runTools({
  model: MODEL,
  stream: true,
  messages: [{ role: 'user', content: PROMPT }],
  tools: [{ type: 'function', function: fn }],
});
console.log(await runner.finalContent());
