// An agent on Anthropic's SDK, streamed.
import Anthropic from '@anthropic-ai/sdk';
import { MODEL, PARAMETERS, PROMPT, bash } from './shell.mjs';

const client = new Anthropic();
const tools = [{ name: 'bash', description: 'Run a command.', input_schema: PARAMETERS }];
const messages = [{ role: 'user', content: PROMPT }];
for (;;) {
  const message = await client.messages.stream({ model: MODEL, max_tokens: 1024, messages, tools }).finalMessage();
  messages.push({ role: 'assistant', content: message.content });
  const calls = message.content.filter((block) => block.type === 'tool_use');
  if (!calls.length) {
    console.log(message.content.map((block) => block.text ?? '').join(''));
    break;
  }
  const results = calls.map(async ({ id, input }) => ({ type: 'tool_result', tool_use_id: id, content: await bash(input) }));
  messages.push({ role: 'user', content: await Promise.all(results) });
}
