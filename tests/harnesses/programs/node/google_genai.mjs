// A chat on Google's SDK, streamed.
import { GoogleGenAI } from '@google/genai';
import { MODEL, PARAMETERS, PROMPT, bash } from './shell.mjs';

const baseUrl = process.env.GOOGLE_GEMINI_BASE_URL;
const ai = new GoogleGenAI({ apiKey: process.env.GEMINI_API_KEY, httpOptions: { baseUrl, retryOptions: { attempts: 3 } } });
const declaration = { name: 'bash', description: 'Run a command.', parametersJsonSchema: PARAMETERS };
const chat = ai.chats.create({ model: MODEL, config: { tools: [{ functionDeclarations: [declaration] }] } });
let message = PROMPT;
for (;;) {
  const calls = [];
  let text = '';
  for await (const chunk of await chat.sendMessageStream({ message })) {
    calls.push(...(chunk.functionCalls ?? []));
    text += chunk.text ?? '';
  }
  if (!calls.length) {
    console.log(text);
    break;
  }
  const outputs = await Promise.all(calls.map(({ args }) => bash(args)));
  message = calls.map(({ id, name }, index) => ({ functionResponse: { id, name, response: { output: outputs[index] } } }));
}
